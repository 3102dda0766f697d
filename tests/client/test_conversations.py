"""What is read from the log of each version, held to what that version sent."""

import json
from pathlib import Path

import pytest

from replay_pipeline.ingesters import IngestReport, ingest
from tests.client.clients import FIRST_WITH_REQUESTS, VERSIONS, numbers_of
from tests.client.comparison import Compared
from tests.client.conversations import CONVERSATIONS
from tests.client.lab import lab
from tests.client.table import TABLE, measured

RENDERED = (2, 1, 280)
"""The first version that logs attachments as they were shown."""
LEAST_SHARE = 0.98
"""Of the messages that a version from `RENDERED` on sent."""
SLACK = 0.02
"""How far below its row of the table a version may fall: some conversations hang on a race."""


def had(version: str, name: str) -> tuple[list[Compared], IngestReport]:
    """Have one conversation with one version, once, and compare."""
    return lab().compared(version, name)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("version", [v for v in VERSIONS if numbers_of(v) >= FIRST_WITH_REQUESTS])
def test_every_decision_is_the_request_as_it_was_sent(version: str, name: str):
    decisions, report = had(version, name)
    for decision in decisions:
        assert decision.missing == decision.made_up == []
        assert decision.is_equal
        assert decision.is_exact
    assert report.requests.keys() == {"exact"}
    assert report.requests["exact"] >= len(decisions)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_newest_client_logs_nothing_that_is_not_known(name: str):
    _, report = had(VERSIONS[-1], name)
    assert report.skipped.keys() <= {"bookkeeping", "synthetic", "transcript_only", "duplicate_row"}
    assert report.rows == report.rows_used + sum(report.skipped.values())


@pytest.mark.parametrize("name", ["queued", "interrupted"])
@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_client_prints_has_the_decisions_that_it_logs(
    version: str, name: str, tmp_path: Path
):
    logs, _, said = lab().had(version, name)
    (tmp_path / "out.jsonl").write_text(said)
    found = [ingest(place, redact=False).states for place in (tmp_path, logs)]
    columns = ["state_id", "action_text", "action_tool_calls_json"]
    printed, logged = (states.select(columns).sort_by("state_id") for states in found)
    assert printed.equals(logged)
    assert printed.num_rows >= 2


@pytest.mark.parametrize(
    "version", [v for v in VERSIONS if RENDERED <= numbers_of(v) < FIRST_WITH_REQUESTS]
)
def test_what_was_rendered_is_nearly_all_that_was_sent(version: str):
    decisions = [each for name in CONVERSATIONS for each in had(version, name)[0]]
    share = sum(each.n_equal for each in decisions) / sum(each.n_sent for each in decisions)
    assert share >= LEAST_SHARE
    assert all(each.has_system for each in decisions)


@pytest.mark.parametrize("version", [v for v in VERSIONS if numbers_of(v) < FIRST_WITH_REQUESTS])
def test_as_many_messages_of_older_versions_are_equal_as_the_table_says(version: str):
    known = json.loads(TABLE.read_text())[version]
    counts = [measured(lab(), version, name) for name in CONVERSATIONS]
    share = sum(equal for equal, _ in counts) / sum(sent for _, sent in counts)
    told = sum(equal for equal, _ in known.values()) / sum(sent for _, sent in known.values())
    assert share >= told - SLACK
