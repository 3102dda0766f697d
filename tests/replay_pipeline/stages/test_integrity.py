"""Every byte of a data root is vouched for, and what is damaged is made again as it was."""

import random
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replay_pipeline.cli import app
from replay_pipeline.errors import SchemaError
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.receipts import Receipts
from replay_pipeline.storage.root_index import FILE
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.roots import pipeline_at, run_batches
from tests.support.settings_files import write_settings

N_FLIPS = 50


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The sample taken as far as the dataset; its logs are gone, as they are after some weeks."""
    home = tmp_path_factory.mktemp("integrity")
    shutil.copytree(SESSIONS_DIR, home / "logs")
    write_settings(
        home / "data",
        ingest={"sources": [home / "logs"], "max_batch_sessions": 8, "settle_s": 0},
        replay={"sample_teachers": True},
    )
    work = pipeline_at(home / "data")
    run_batches(work)
    work.publish()
    (home / "logs").rename(home / "gone")
    return home / "data"


@pytest.fixture
def root(made, tmp_path) -> Path:
    """A copy to spoil."""
    shutil.copytree(made, tmp_path / "data")
    return tmp_path / "data"


def flip(path: Path, random: random.Random) -> bytes:
    """Change one byte. Gives what was there."""
    before = path.read_bytes()
    spoiled = bytearray(before)
    spoiled[random.randrange(len(before))] ^= random.randrange(1, 256)
    path.write_bytes(spoiled)
    return before


def files_of(root: Path) -> dict[str, list[Path]]:
    """What stages have written, by folder; databases have checks of their own."""
    found: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if path.is_file() and ".sqlite" not in name.name and name.name != "settings.toml":
            found.setdefault(name.parts[0], []).append(path)
    return found


def bytes_of(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for paths in files_of(root).values() for path in paths}


def damaged(work: Pipeline) -> list[str]:
    return [each["path"] for each in work.verify()["damaged"]]


def test_any_flipped_byte_is_found_and_made_again_as_it_was(root):
    chosen = random.Random(23)
    folders = files_of(root)
    for path in folders.pop("dataset"):
        folders.setdefault("/".join(path.relative_to(root).parts[:2]), []).append(path)
    assert {"dataset/README.md", "dataset/data", "dataset/manifests"} <= folders.keys()
    intact = bytes_of(root)
    # What cannot be made again once the logs are gone has a test of its own.
    kinds = sorted(folders.keys() - {"sources"})
    assert len(kinds) >= 15
    for number in range(N_FLIPS):
        path = chosen.choice(folders[kinds[number % len(kinds)]])
        flip(path, chosen)
        name = path.relative_to(root).as_posix()
        assert damaged(pipeline_at(root)) == [name]
        report = pipeline_at(root).repair()
        assert (report["repaired"], report["left"]) == ([name], {})
        assert path.read_bytes() == intact[path]
    assert bytes_of(root) == intact


def test_a_repair_writes_nothing_but_what_is_damaged(root):
    times = {path: path.stat().st_mtime_ns for path in bytes_of(root)}
    work = pipeline_at(root)
    spoiled = {
        work.root.part("states", work.batches()[0]),
        work.root.part("normalized_pairs", work.batches()[1]),
    }
    for path in spoiled:
        flip(path, random.Random(1))
    spent = work.status()["ledger"]
    assert work.repair()["left"] == {}
    written = {path for path in times if path.stat().st_mtime_ns != times[path]}
    assert written == spoiled
    assert pipeline_at(root).status()["ledger"] == spent


def test_a_whole_root_without_its_tables_and_dataset_is_made_again(root):
    intact = bytes_of(root)
    for folder in files_of(root).keys() - {"batches", "receipts", "sources", "dataset"}:
        path = root / folder
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(root / "dataset" / "data")
    assert pipeline_at(root).repair()["left"] == {}
    assert bytes_of(root) == intact


def test_kept_bytes_are_kept_again_only_while_their_log_is_there(root, made):
    piece = next((root / "sources").rglob("*.zst"))
    before = flip(piece, random.Random(2))
    report = pipeline_at(root).repair()
    assert list(report["left"]) == [piece.relative_to(root).as_posix()]
    assert "log" in next(iter(report["left"].values()))
    logs = made.parent / "logs"
    (made.parent / "gone").rename(logs)
    try:
        assert pipeline_at(root).repair()["left"] == {}
    finally:
        logs.rename(made.parent / "gone")
    assert piece.read_bytes() == before


def test_a_table_whose_session_bytes_are_damaged_is_left_and_says_so(root):
    work = pipeline_at(root)
    table = work.root.part("turns", work.batches()[0])
    for path in [table, *(root / "sources").rglob("*.zst")]:
        path.unlink()
    before = bytes_of(root)
    report = pipeline_at(root).repair()
    assert "no longer exists" in report["left"][table.relative_to(root).as_posix()]
    assert bytes_of(root) == before


def test_answers_that_the_ledger_has_lost_are_told_and_not_paid_again(root):
    work = pipeline_at(root)
    table = work.root.part("teacher_actions", work.batches()[0])
    spoiled = flip(table, random.Random(3)), table.read_bytes()
    for path in root.glob("sample-ledger.sqlite*"):
        path.unlink()
    report = pipeline_at(root).repair()
    assert "ledger" in report["left"][table.relative_to(root).as_posix()]
    assert table.read_bytes() == spoiled[1]
    assert pipeline_at(root).status()["ledger"]["spent_usd"] == 0


def test_a_damaged_ledger_is_found_and_has_to_come_from_a_backup(root):
    ledger = root / "sample-ledger.sqlite"
    data = bytearray(ledger.read_bytes())
    data[4096 : 4096 * 3] = bytes(4096 * 2)
    ledger.write_bytes(data)
    assert damaged(pipeline_at(root)) == [str(ledger)]
    assert "backup" in pipeline_at(root).repair()["left"][str(ledger)]


def test_a_damaged_index_is_made_again(root):
    index = root / FILE
    data = bytearray(index.read_bytes())
    data[4096 : 4096 * 4] = bytes(4096 * 3)
    index.write_bytes(data)
    assert FILE in damaged(pipeline_at(root))
    assert pipeline_at(root).repair()["left"] == {}
    assert damaged(pipeline_at(root)) == []
    receipt = next((root / "receipts" / "pairs").glob("*.json"))
    before = flip(receipt, random.Random(4))
    assert pipeline_at(root).repair()["left"] == {}
    assert receipt.read_bytes() == before


def test_a_damaged_receipt_counts_as_none_and_says_what_to_do(root, caplog):
    path = next((root / "receipts" / "pairs").glob("*.json"))
    path.write_bytes(path.read_bytes().replace(b'"n_pairs": ', b'"n_pairs": 1'))
    assert Receipts(root).read("pairs", path.stem) is None
    assert "replay-pipeline repair" in caplog.text


def test_receipts_of_an_older_version_are_counted_until_an_upgrade_adds_their_digests(root):
    work = pipeline_at(root)
    path = work.receipts.path("normalize", work.batches()[0])
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in text if not line.startswith(' "digest"')))
    assert work.verify()["n_without_digest"] == 1
    assert damaged(work) == []
    work.upgrade()
    assert pipeline_at(root).verify()["n_without_digest"] == 0
    assert damaged(pipeline_at(root)) == []


def test_what_was_retracted_is_no_damage(root):
    work = pipeline_at(root)
    work.retract(batches=work.batches()[:1])
    assert damaged(pipeline_at(root)) == []
    path = next((root / "dataset" / "data" / "pairs").rglob("*.parquet"))
    before = flip(path, random.Random(5))
    assert pipeline_at(root).repair()["left"] == {}
    assert path.read_bytes() == before


def test_both_commands_end_with_1_where_something_is_damaged(root):
    table = pipeline_at(root).root.part("outcomes", pipeline_at(root).batches()[0])
    run = CliRunner().invoke
    assert run(app, ["verify", "--data", str(root)]).exit_code == 0
    flip(table, random.Random(6))
    found = run(app, ["verify", "--data", str(root)])
    assert found.exit_code == 1
    assert "outcomes" in found.output
    assert run(app, ["repair", "--data", str(root)]).exit_code == 0
    next((root / "sources").rglob("*.zst")).unlink()
    assert run(app, ["repair", "--data", str(root)]).exit_code == 1


def test_a_damaged_table_names_the_commands_that_find_and_mend_it(root):
    work = pipeline_at(root)
    path = work.root.part("states", work.batches()[0])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(SchemaError, match=r"replay-pipeline verify.*replay-pipeline repair"):
        work.root.read("states", work.batches()[0])
