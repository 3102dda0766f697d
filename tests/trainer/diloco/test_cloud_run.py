"""A cloud run from the command line alone: private dataset and bucket in, a model out."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.forked import forked, forked_python
from tests.support.hub import HubServer
from tests.trainer.diloco.cloud_servers import JobsHub, SandboxCloud
from tests.trainer.programs import SMALL, words_of
from trainer.__main__ import main
from trainer.diloco import open_store

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[3]
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "bucket-s3cr3t"}
SETTINGS = (
    "output={folder}/model-{{rank}}", "dataset=me/my-pairs", *SMALL,
    "tiny.pretraining_steps=2", "trl.max_completion_length=16",
    "evaluation.max_prompts=0", "trl.max_steps=4",
    "outer_options.sync_every=2", "outer_options.quorum={n}",
)  # fmt: skip
N_REPLICAS = {"hf_jobs": 2, "modal": 1}
ROUNDS = {"hf_jobs": "synchronous", "modal": "auto"}
"""Each is a process of many seconds: what is only the platform's is seen with one."""


@pytest.fixture
def bucket(moto):
    return f"http://127.0.0.1:{moto.port}"


UPLOAD = """
import sys
from huggingface_hub import HfApi
api, here = HfApi(), {"repo_id": "me/my-pairs", "repo_type": "dataset"}
api.create_repo(**here, private=True)
api.upload_folder(**here, folder_path=sys.argv[1])
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory, dataset_folder):
    """A Hub with a private dataset."""
    with HubServer(tmp_path_factory.mktemp("hub")) as hub:
        upload = forked([sys.executable, "-c", UPLOAD, dataset_folder], "libraries")
        subprocess.run(upload, env={**os.environ, **hub.environment()}, check=True)
        yield hub


@pytest.fixture(params=["hf_jobs", "modal"])
def cloud(request, tmp_path, monkeypatch):
    """A platform whose containers have Python, this package, and no variable of ours."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "HF_", "REPLICA_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(forked_python("libraries"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    cloud = (JobsHub if request.param == "hf_jobs" else SandboxCloud)(tmp_path)
    account = {
        "hf_jobs": {"HF_ENDPOINT": cloud.url},
        "modal": {
            "MODAL_SERVER_URL": cloud.url, "MODAL_TOKEN_ID": "ak-x", "MODAL_TOKEN_SECRET": "as-x",
        },
    }  # fmt: skip
    yield request.param, account[request.param], cloud
    cloud.close()


def test_the_documented_line_ends_with_a_model_after_its_launcher_was_killed(
    tmp_path, bucket, hub, cloud, monkeypatch, capsys
):
    platform, account, servers = cloud
    n, uri = N_REPLICAS[platform], f"s3://bucket/{platform}"
    shell = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), **KEYS, "HF_TOKEN": hub.read_token,
        "AWS_ENDPOINT_URL": bucket, **account,
    }  # fmt: skip

    def trainer(*arguments):
        command = forked([sys.executable, "-m", "trainer", *arguments], "libraries")
        return subprocess.Popen(
            command, env=shell, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    work_dir = ["--work-dir", str(tmp_path / "outer")]
    to_replicas = {
        "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "AWS_ENDPOINT_URL": bucket,
        "HF_HOME": str(tmp_path / "cache"),
    }  # fmt: skip
    launcher = trainer(
        "launch", "--replicas", str(n), "--executor", platform, "--uri", uri, *work_dir,
        "--image", "me/image",
        *(part for name in (*KEYS, "HF_TOKEN") for part in ("--secret", name)),
        *(part for pair in to_replicas.items() for part in ("--env", "=".join(pair))),
        *words_of(f"outer_options.rounds={ROUNDS[platform]}"),
        *words_of(*(text.format(folder=tmp_path, n=n) for text in SETTINGS)),
    )  # fmt: skip
    options = {
        "endpoint_url": bucket,
        "key": KEYS["AWS_ACCESS_KEY_ID"],
        "secret": KEYS["AWS_SECRET_ACCESS_KEY"],
    }
    store = open_store(uri, options=options)
    while not store.keys("rounds/"):
        assert launcher.poll() is None, launcher.communicate()[0].decode()
        threading.Event().wait(0.1)
    launcher.kill()
    launcher.communicate()
    probe, *trained = servers.jobs.values()
    assert probe.code() == 0, probe.log()
    assert [job.code() for job in trained] == [None] * n, "the jobs go on"
    for path in (tmp_path / "outer").rglob("*"):
        assert path.is_dir() or b"s3cr3t" not in path.read_bytes(), path
    attached = trainer("launch", "--attach", *work_dir)
    told = attached.communicate()[0].decode()
    assert attached.returncode == 0, told
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": bucket}.items():
        monkeypatch.setenv(name, value)
    assert main(["export", "--uri", uri, "--output", str(tmp_path / "made")]) == 0
    assert "after 2 rounds" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    AutoTokenizer.from_pretrained(tmp_path / "made")
    ended = AutoModelForCausalLM.from_pretrained(tmp_path / "model-0" / "checkpoint")
    for ours, theirs in zip(model.parameters(), ended.parameters(), strict=True):
        assert ours.equal(theirs)
