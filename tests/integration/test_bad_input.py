"""Bad input at every entrance ends with one clear line and a code, and loses nothing."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from replay_pipeline.settings import config_dir
from replay_pipeline.storage.processes import child_environment
from replay_pipeline.storage.trust import host_of, trust_host
from replay_pipeline.testing.sample import ANSWERS_FILE, SESSIONS_DIR
from tests.roots import PROJECT
from tests.support.commands import command
from tests.support.settings_files import write_settings
from tests.support.teachers import TeacherServer

pytestmark = pytest.mark.slow

OTHER = {"name": "other", "model": "z-ai/glm-4.6", "dialect": "openrouter"}


def full_at(n_bytes: int) -> dict[str, Any]:
    """Let no file of the program grow beyond `n_bytes`, as on a disk that is full."""
    return {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))}


def assert_one_clear_line(
    done: subprocess.CompletedProcess[str], *named: str, may_log: bool = False
) -> None:
    assert done.returncode not in (0, -9), done.stdout
    assert "Traceback" not in done.stderr
    lines = [
        line
        for line in done.stderr.splitlines()
        if line.strip()
        and not re.fullmatch(r"\w+ \d+( of \d+)?(, \$[\d.]+( of \$[\d.]+)?)?", line)  # progress
    ]
    assert len(lines) == 1 or may_log, done.stderr
    assert sum("error: " in line for line in lines) <= 1
    for name in named:
        assert name in lines[-1], lines[-1]


@pytest.fixture(scope="module")
def paid_root(tmp_path_factory) -> Path:
    """A data root with one batch that is ingested and paid for."""
    folder = tmp_path_factory.mktemp("paid")
    project = sorted(p for p in SESSIONS_DIR.iterdir() if p.is_dir())[0]
    words = ("run", project, "--data", folder / "d", "--no-train")
    done = command(*words, cwd=folder, REPLAY_TEACHERS="sample")
    assert done.returncode == 0, done.stderr
    return folder / "d"


def contents(root: Path) -> dict[str, int]:
    return {
        str(path.relative_to(root)): path.stat().st_size
        for path in root.rglob("*.parquet")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("ingest gone.jsonl --out o", "gone.jsonl"),
        ("run gone --data d", "gone"),
        ("ingest words.jsonl --out o", "words.jsonl"),
        ("ingest json.jsonl --out o", "json.jsonl"),
        ("ingest bytes.jsonl --out o", "bytes.jsonl"),
        ("ingest empty.jsonl --out o", "empty.jsonl"),
        ("estimate --teachers nobody", "sample, rehearsal"),
        ("run --settings name.toml", "name.toml"),
        ("run --settings text.toml", "text.toml"),
        ("run --settings type.toml", "type.toml"),
    ],
)  # fmt: skip
def test_what_cannot_be_worked_with_is_named_in_one_line(tmp_path, words, named):
    files = {
        "words.jsonl": "hello\nthere\n", "json.jsonl": '{"some": "json"}\n[1, 2]\n',
        "bytes.jsonl": "\x00\x01\x02", "empty.jsonl": "", "name.toml": "[replay]\nnope = 1\n",
        "text.toml": "not toml", "type.toml": "[pairs]\nlevel = 3\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert_one_clear_line(command(*words.split(), cwd=tmp_path), named)


def test_a_missing_key_is_found_before_anything_is_sent(paid_root, tmp_path):
    before = contents(paid_root)
    done = command("replay", "--data", paid_root, "--yes", cwd=tmp_path)
    assert_one_clear_line(done, "OPENROUTER_API_KEY")
    assert contents(paid_root) == before


def test_a_rejected_key_is_said_and_paid_answers_stay(paid_root, tmp_path):
    before = contents(paid_root)
    with TeacherServer(ANSWERS_FILE, faults=[{"kind": "status", "status": 401}]) as server:
        teacher = {**OTHER, "base_url": server.base_url, "api_key_env": "OWN_KEY"}
        trust_host(host_of(server.base_url), key="OWN_KEY", folder=config_dir())
        settings = write_settings(tmp_path, replay={"teachers": [teacher]})
        done = command(
            "replay", "--data", paid_root, "--settings", settings, "--yes", cwd=tmp_path,
            OWN_KEY="sk-or-v1-wrong",
        )  # fmt: skip
    assert_one_clear_line(done, "key was rejected", may_log=True)
    assert "sk-or-v1-wrong" not in done.stderr + done.stdout
    kept = contents(paid_root)
    assert {path for path in before if "teacher_actions" not in path} <= set(kept)


def test_an_unknown_model_names_what_is_served(paid_root, tmp_path):
    with TeacherServer(ANSWERS_FILE) as server:
        teacher = {**OTHER, "base_url": server.base_url, "model": "z-ai/glm-9", "api_key_env": ""}
        settings = write_settings(tmp_path, replay={"teachers": [teacher]})
        done = command("replay", "--data", paid_root, "--settings", settings, "--yes", cwd=tmp_path)
    assert_one_clear_line(done, "z-ai/glm-9", "z-ai/glm-4.6")


def test_a_budget_of_0_changes_nothing(paid_root, tmp_path):
    before = contents(paid_root)
    done = command(
        "replay", "--data", paid_root, "--budget=0", cwd=tmp_path, REPLAY_TEACHERS="sample"
    )
    assert done.returncode == 0, done.stderr
    assert contents(paid_root) == before


@pytest.mark.parametrize("budget", ["-1", "nan", "inf"])
def test_a_budget_that_is_no_ceiling(paid_root, tmp_path, budget):
    before = contents(paid_root)
    done = command(
        "replay", "--data", paid_root, f"--budget={budget}", cwd=tmp_path, REPLAY_TEACHERS="sample"
    )
    assert_one_clear_line(done, "the command line: replay.max_total_usd")
    assert contents(paid_root) == before


def test_an_unknown_batch_lists_the_known_ones(paid_root, tmp_path):
    (known,) = {path.stem for path in (paid_root / "batches").glob("*.json")}
    for stage in ("pairs", "normalize", "replay"):
        done = command(stage, "--data", paid_root, "--batch", "nope", cwd=tmp_path)
        assert_one_clear_line(done, "nope", known)


def test_marks_of_the_review_page_take_pairs_out_and_are_counted(paid_root, tmp_path):
    sample = ("--data", paid_root, "--json")
    first = json.loads(command("pairs", *sample, cwd=tmp_path).stdout)
    (batch,) = first
    (part,) = (paid_root / "dpo_pairs").glob("*/part-0.parquet")
    pair_id = pq.read_table(part, partitioning=None)["pair_id"][0].as_py()
    marks = {"format": "replay-pipeline marks 2", "marks": {pair_id: "reject"}}
    (tmp_path / "marks.json").write_text(json.dumps(marks))
    done = command("pairs", *sample, "--marks", "marks.json", cwd=tmp_path)
    report = json.loads(done.stdout)[batch]
    assert report["n_pairs"] == first[batch]["n_pairs"] - report["n_rejected_in_review"]
    assert report["n_rejected_in_review"] == 1
    (tmp_path / "marks.json").write_text("[]")
    done = command("pairs", *sample, "--marks", "marks.json", cwd=tmp_path)
    assert_one_clear_line(done, "marks.json")
    assert json.loads(command("pairs", *sample, cwd=tmp_path).stdout) == first


def test_an_output_that_cannot_be_written_loses_nothing(tmp_path):
    (tmp_path / "taken").write_text("a file where a folder should be")
    done = command("ingest", PROJECT, "--out", "taken", cwd=tmp_path)
    assert_one_clear_line(done, "taken", "cannot be written")
    assert (tmp_path / "taken").read_text() == "a file where a folder should be"


def test_a_full_disk_while_ingesting_writes_nothing(tmp_path):
    done = command("ingest", PROJECT, "--out", "o", cwd=tmp_path, options=full_at(4_000))
    assert_one_clear_line(done, "cannot be written")
    assert not list((tmp_path / "o").glob("*turns*"))


def test_a_full_disk_while_replaying_loses_no_paid_answer(tmp_path):
    words = ("--data", "d", "--budget", "2")
    assert command("ingest", PROJECT, "--data", "d", cwd=tmp_path).returncode == 0
    full = full_at(150_000)
    done = command("replay", *words, cwd=tmp_path, options=full, REPLAY_TEACHERS="sample")
    assert_one_clear_line(done, "ledger.sqlite", may_log=True)
    done = command("replay", *words, "--json", cwd=tmp_path, REPLAY_TEACHERS="sample")
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout).values()
    assert report["is_complete"]
    assert report["n_cached"] > 0
    status = json.loads(
        command("status", "--data", "d", "--json", cwd=tmp_path, REPLAY_TEACHERS="sample").stdout
    )
    assert status["ledger"]["spent_usd"] == pytest.approx(report["spent_usd"])


def test_debug_shows_the_stack_above_the_line_and_nothing_else_does(tmp_path):
    words = ("estimate", "--data", tmp_path / "none")
    assert_one_clear_line(command(*words, cwd=tmp_path), "replay-pipeline ingest")
    for asked in (("--debug", *words), (*words, "--debug")):
        done = command(*asked, cwd=tmp_path)
        assert "Traceback (most recent call last)" in done.stderr
        assert "error: " in done.stderr.splitlines()[-1]
        assert done.returncode == 2


def test_a_system_without_locks_of_unix_makes_a_dataset_and_says_that_it_cannot_train(tmp_path):
    """As Windows is."""
    without = "import sys, warnings; sys.modules['fcntl'] = None; warnings.simplefilter('ignore'); "
    session = sorted(PROJECT.glob("*.jsonl"))[0]
    start = [sys.executable, "-c", without + "from replay_pipeline.cli import main; main()"]
    (tmp_path / "none.toml").write_text("[normalize]\nrecipe = 'none'\n")
    words = ["run", session, "--data", "d", "--settings", "none.toml", "--no-train", "--json"]
    done = subprocess.run(
        [*start, *words], cwd=tmp_path, env=child_environment(REPLAY_TEACHERS="sample"),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answers"] > 0
    start[-1] = without + "from trainer.__main__ import main; sys.exit(main([]))"
    done = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "training needs Linux or macOS" in done.stderr
    assert "Traceback" not in done.stderr
