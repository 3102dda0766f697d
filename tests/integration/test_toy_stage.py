"""A stage of one's own: defined here, in the list of stages, and with that in every command and in Dagster."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replay_pipeline.cli import app
from replay_pipeline.stages.audit import AuditResult
from replay_pipeline.stages.chain import STAGES
from replay_pipeline.stages.receipts import Receipt
from replay_pipeline.stages.stage import Check, Stage, Task
from replay_pipeline.storage import schemas
from replay_pipeline.storage.tables import DataRoot, table_of
from tests.roots import pipeline_at, project_root

pytestmark = pytest.mark.slow


def count_words(task: Task) -> dict[str, int]:
    least = task.project.settings.pairs.agreement_threshold
    states = task.read("states").to_pylist()
    words = {row["state_id"]: len((row["action_text"] or "").split()) for row in states}
    rows = [{"state_id": key, "n_words": n} for key, n in words.items() if n >= least]
    task.write("word_counts", table_of(rows, "word_counts"))
    return {"n_rows": len(rows), "n_words": sum(row["n_words"] for row in rows)}


def some_words(root: DataRoot, batches: list[str]) -> AuditResult:
    """Has every batch words?"""
    empty = [batch for batch in batches if not root.n_rows("word_counts", batch)]
    return AuditResult(
        problems=[f"batch {batch}: no words" for batch in empty], judged=len(batches)
    )


def words_in_all(receipts: list[Receipt]) -> dict[str, int]:
    return {"words": sum(receipt.report["n_words"] for receipt in receipts)}


TABLE = {
    "about": "The words of an action.",
    "written_by": "count",
    "columns": {
        "state_id": ["text", "The state."],
        "n_words": ["int64", "How many words its action has."],
    },
}
COUNT = Stage(
    name="count",
    about="How many words each action has.",
    version=1,
    work=count_words,
    reads=("states",),
    writes=("word_counts",),
    settings=lambda settings: {"pairs.agreement_threshold": settings.pairs.agreement_threshold},
    told="n_rows",
    figures=words_in_all,
    facts=lambda _, receipt: {"words": receipt.report["n_words"]},
    checks=(Check(name="some_words", look=some_words),),
)


@pytest.fixture(autouse=True)
def toy(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(schemas, "_COLUMNS", dict(schemas._COLUMNS))
    schemas.declare("word_counts", TABLE)
    STAGES.insert(1, COUNT)
    yield
    STAGES.remove(COUNT)
    for tables in (schemas.TABLES, schemas.REPEATING, schemas.ABOUT, schemas.WRITTEN_BY):
        del tables["word_counts"]


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("REPLAY_DATA", str(tmp_path / "data"))
    project_root(tmp_path / "data")
    return tmp_path / "data"


def told(*words: str) -> dict:
    done = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


def test_a_stage_in_the_list_is_in_every_command(root):
    summary = told("run", "--no-train", "--yes")
    work = pipeline_at(root)
    counted = {key: work.root.n_rows("word_counts", key) for key in work.batches()}
    assert min(counted.values()) > 0
    assert summary["words"] > sum(counted.values())
    assert summary["seconds"]["count"] >= 0

    assert {key: row["count"] for key, row in told("status")["batches"].items()} == counted
    assert " rows " in CliRunner().invoke(app, ["status"]).stdout
    assert told("status", "--stale")["batches"] == {}
    written = (root / "settings.toml").read_text()
    (root / "settings.toml").write_text(
        written.replace("[pairs]\n", "[pairs]\nagreement_threshold = 3\n")
    )
    reason = ["pairs.agreement_threshold: 2 → 3"]
    stale = told("status", "--stale")["batches"]
    assert {key: stale[key]["count"] for key in counted} == dict.fromkeys(counted, reason)

    first = work.batches()[0]
    part = work.root.part("word_counts", first)
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    (damage,) = told("verify")["damaged"]
    assert (damage["stage"], damage["batch"]) == ("count", first)
    part.unlink()
    told("run", "--no-train", "--yes")
    assert told("verify")["damaged"] == []
