"""The whole pipeline with its data root on S3: real client, real server, Dagster on top."""

import json
import shutil

import dagster as dg
import pytest

from replay_pipeline.assets.code_location import run_jobs
from replay_pipeline.assets.records import sync
from replay_pipeline.publish import newest
from replay_pipeline.settings import Settings
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.storage.store import as_path, files_below
from tests.roots import PROJECT, run_batches, settings_at
from tests.support.commands import command
from tests.support.forked import forked_python
from tests.trainer.diloco.s3_server import MotoServer

pytestmark = [
    pytest.mark.slow,
    # Dagster's own Pipes code uses names that Dagster has deprecated, or not yet promised.
    pytest.mark.filterwarnings("ignore:.*run_id.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*expected_writer_count.*"),
]

TRAINER = """\
tiny: {vocab_size: 512, hidden_size: 32, n_layers: 1}
reward: consensus
evaluation: {max_pairs: 4, max_prompts: 1, max_new_tokens: 4}
preflight: {max_cut_prompts: 1.0}
trl: {max_steps: 1, beta_replay: 1.0, dpo_variant: simpo, per_device_train_batch_size: 4,
  num_generations: 4, pairs_per_step: 4, max_completion_length: 16, max_prompt_tokens: 256, prompt_window: tail,
  max_response_tokens: 64, render_tools: false, seed: 0}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = MotoServer(tmp_path_factory.mktemp("s3"))
    yield server
    server.close()


@pytest.fixture
def s3(server, monkeypatch):
    """Credentials and endpoint where a store's client looks for them: in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "not-checked")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-secret-of-the-store")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def by_hand(work: Pipeline) -> None:
    run_batches(work)
    work.publish()


def test_the_demo_on_s3_gives_the_bytes_that_a_folder_gives(s3, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", forked_python())
    (tmp_path / "tiny.yaml").write_text(TRAINER)
    here = Pipeline(settings_at(tmp_path / "here", tmp_path / "here"))
    by_hand(here)
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(tmp_path / "here" / "sample-ledger.sqlite", home)
    settings_file = tmp_path / "settings.toml"
    settings_file.write_text(
        f"home_dir = {json.dumps(str(home))}\n"
        f"[ingest]\nsources = [{json.dumps(str(PROJECT))}]\n"
        "[replay]\nsample_teachers = true\nask_at = 'steps'\n"
        f"[train]\nconfig = {json.dumps(str(tmp_path / 'tiny.yaml'))}\n"
    )
    there = Pipeline(Settings.load(settings_file, data_dir=as_path("s3://bucket/demo"), env={}))
    there.ingest_new()
    run_jobs(there)

    root, folder = there.root.path, tmp_path / "here"
    tables = [n for n in files_below(folder) if n.endswith(".parquet") and "dataset" not in n]
    assert len(tables) > 9
    for name in tables:
        assert (root / name).read_bytes() == (folder / name).read_bytes(), name
    dataset = newest(root / "dataset")
    assert dataset is not None
    assert files_below(dataset) == files_below(folder / "dataset")
    for name in files_below(dataset):
        if not name.startswith("manifests/") and name != "README.md":
            assert (dataset / name).read_bytes() == (folder / "dataset" / name).read_bytes(), name
    assert (root / "model" / "checkpoint" / "model.safetensors").exists()
    with dg.DagsterInstance.from_config(str(home / ".dagster")) as instance:
        done = instance.get_materialized_partitions(dg.AssetKey("normalized_pairs"))
        assert done == set(there.batches())

    before = list(there.receipts.all())
    run_jobs(there)
    assert list(there.receipts.all()) == before
    shutil.rmtree(home / ".dagster")
    assert sync(there) == len(list(there.receipts.all()))
    for folder in (home, tmp_path / "here"):
        for path in folder.rglob("*"):
            assert not path.is_file() or b"planted-secret" not in path.read_bytes(), path


def test_the_command_line_takes_a_url_and_tells_what_is_wrong_with_it(s3, tmp_path):
    done = command("ingest", PROJECT, "--data", "s3://bucket/cli", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["states"] > 0
    status = command("status", cwd=tmp_path, REPLAY_DATA="s3://bucket/cli")
    assert status.returncode == 2
    assert "REPLAY_HOME" in status.stderr
    assert "Traceback" not in status.stderr
    home = {"cwd": tmp_path, "REPLAY_HOME": str(tmp_path)}
    status = command("status", REPLAY_DATA="s3://bucket/cli", **home)
    assert status.returncode == 0, status.stderr
    missing = command("status", REPLAY_DATA="s3://no-such-bucket/cli", **home)
    assert missing.returncode == 1
    assert "no-such-bucket" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_without_credentials_the_error_says_where_they_are_looked_for(s3, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    done = command("status", "--data", "s3://bucket/other", cwd=tmp_path)
    assert done.returncode == 1
    assert "credentials, endpoint and region in the environment" in done.stderr
    assert "Traceback" not in done.stderr
