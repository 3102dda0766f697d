"""Whether the client of a machine is one whose logs were tested."""

from pathlib import Path

import pytest

from replay_pipeline.ingesters.client_versions import NEWEST_TESTED, newest_client
from replay_pipeline.settings import Settings
from replay_pipeline.stages.doctor import examine
from tests.client.clients import VERSIONS
from tests.replay_pipeline.ingesters.logs import Log


def told(folder: Path, version: str) -> str:
    log = Log(version=version)
    log.user("go")
    log.write(folder, "projects/one.jsonl")
    settings = Settings.load(
        data_dir=folder / "data", changes={"ingest": {"sources": [folder / "projects"]}}
    )
    (finding,) = (f for f in examine(settings, []) if f["what"] == "claude code")
    assert finding["ok"]
    return finding["detail"]


def test_the_newest_version_that_was_tested_is_the_newest_of_the_lab():
    assert VERSIONS[-1] == NEWEST_TESTED


@pytest.mark.parametrize("version", ["2.1.9", NEWEST_TESTED])
def test_a_version_that_was_tested_is_named(tmp_path: Path, version: str):
    assert told(tmp_path, version) == version


def test_a_newer_version_is_told(tmp_path: Path):
    assert told(tmp_path, "2.1.1000").startswith(f"2.1.1000: newer than {NEWEST_TESTED}")


def test_the_newest_of_several_versions_counts_and_none_where_there_is_no_session(tmp_path: Path):
    assert newest_client([tmp_path]) is None
    for number, version in enumerate(["2.1.99", "2.1.100", "2.0.300"]):
        log = Log(f"s{number}", version=version)
        log.user("go")
        log.write(tmp_path)
    assert newest_client([tmp_path, tmp_path / "missing"]) == "2.1.100"
