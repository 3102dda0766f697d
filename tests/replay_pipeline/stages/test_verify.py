"""Changed bytes are found, and once they are deleted a run makes them again as they were."""

import random
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replay_pipeline.cli import app
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.views.status import status_of
from replay_pipeline.stages.views.verify import verify
from tests.roots import pipeline_at, run_batches

pytestmark = pytest.mark.slow


@pytest.fixture
def root(published, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(published, tmp_path / "data"))


def flip(path: Path, random: random.Random) -> None:
    """Change one byte."""
    spoiled = bytearray(path.read_bytes())
    spoiled[random.randrange(len(spoiled))] ^= random.randrange(1, 256)
    path.write_bytes(spoiled)


def bytes_of(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(root.rglob("*.parquet"))}


def damaged(work: Pipeline) -> list[str]:
    return [each["path"] for each in verify(work)["damaged"]]


def test_flipped_bytes_are_found_and_what_is_deleted_is_made_again_for_nothing(root):
    chosen = random.Random(23)
    intact = bytes_of(root)
    spoiled = [
        chosen.choice([path for path in intact if path.relative_to(root).parts[0] == folder])
        for folder in ("dataset", "dpo_pairs", "normalized_pairs", "states", "teacher_actions")
    ]
    assert damaged(pipeline_at(root)) == []
    spent_usd = status_of(pipeline_at(root))["ledger"]["spent_usd"]
    for path in spoiled:
        flip(path, chosen)
    names = {path.relative_to(root).as_posix() for path in spoiled}
    assert set(damaged(pipeline_at(root))) == names
    for path in spoiled:
        path.unlink()
    work = pipeline_at(root)
    assert set(damaged(work)) == names
    run_batches(work)
    work.publish()
    assert bytes_of(root) == intact
    assert damaged(pipeline_at(root)) == []
    assert status_of(pipeline_at(root))["ledger"]["spent_usd"] == spent_usd


def test_a_damaged_ledger_is_found_and_has_to_come_from_a_backup(root):
    ledger = root / "sample-ledger.sqlite"
    data = bytearray(ledger.read_bytes())
    data[4096 : 4096 * 3] = bytes(4096 * 2)
    ledger.write_bytes(data)
    [found] = verify(pipeline_at(root))["damaged"]
    assert found["path"] == str(ledger)
    assert "backup" in found["why"]


def test_a_damaged_manifest_of_the_dataset_is_found(root):
    path = next((root / "dataset" / "manifests").glob("[!_]*.json"))
    path.write_bytes(path.read_bytes()[:-40])
    assert damaged(pipeline_at(root)) == [path.relative_to(root).as_posix()]


def test_a_dataset_of_another_version_is_told_once_and_its_files_are_not_called_damaged(root):
    for path in (root / "dataset" / "manifests").glob("[!_]*.json"):
        path.write_text(path.read_text().replace('"layout"', '"earlier"'))
    [found] = verify(pipeline_at(root))["damaged"]
    assert (found["path"], found["why"]) == (
        "dataset",
        "another version of this program published it",
    )


def test_what_was_retracted_is_no_damage(root):
    work = pipeline_at(root)
    work.retract(batches=work.batches()[:1])
    assert damaged(pipeline_at(root)) == []


def test_the_command_ends_with_1_where_something_is_damaged(root):
    table = pipeline_at(root).root.part("outcomes", pipeline_at(root).batches()[0])
    run = CliRunner().invoke
    assert run(app, ["verify", "--data", str(root)]).exit_code == 0
    flip(table, random.Random(6))
    found = run(app, ["verify", "--data", str(root)])
    assert found.exit_code == 1
    assert "outcomes" in found.output
