"""The bundled sample: the outcomes are those that its authors meant, and format does not matter."""

import json
from pathlib import Path

import pytest

from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.publish.blind import blind_control
from replay_pipeline.stages.pages.pairs import portion
from replay_pipeline.testing.sample import ANSWERS_FILE, SESSIONS_DIR
from replay_pipeline.types import TeacherAction
from tests.support.votes import extract_pairs

EXPECTED = json.loads(
    (Path(__file__).parents[3] / "recipes" / "sample" / "expected.json").read_text("utf-8")
)


@pytest.fixture(scope="module")
def sample():
    states = list(ClaudeCodeIngester().ingest(SESSIONS_DIR))
    rows = []
    for line in ANSWERS_FILE.read_text("utf-8").splitlines():
        one = json.loads(line)
        if "+" in one["state_id"]:  # what follows a look is asked for at consequences alone
            continue
        rows.append(
            TeacherAction(
                state_id=one["state_id"],
                teacher=one["model"],
                model=one["model"],
                family=one["model"].split("/")[0],
                action=one.get("message"),
                error_code=None if one.get("message") else "failed",
            )
        )
    return states, rows, extract_pairs(states, rows)


NAMES = {"agreement": "agrees_with_student"}
"""What the authors of the sample call an outcome by another name."""


def test_outcomes_are_the_intended_ones(sample):
    _, _, report = sample
    found = {row["state_id"]: NAMES.get(row["outcome"], row["outcome"]) for row in report.outcomes}
    assert found.keys() == EXPECTED.keys()
    assert {key: found[key] for key in found if found[key] != EXPECTED[key]["outcome"]} == {}


def test_the_chosen_side_cannot_be_told_without_the_prompt(sample):
    _, _, report = sample
    control = blind_control(
        [json.dumps(pair["chosen_action"]) for pair in report.pairs],
        [json.dumps(pair["rejected_action"]) for pair in report.pairs],
        [pair["session_id"] for pair in report.pairs],
    )
    assert control.n_pairs == len(report.pairs)
    assert 0.42 <= control.ngrams <= 0.58
    assert 0.42 <= control.length <= 0.58
    assert 0.42 <= control.tools <= 0.58


def test_string_equality_would_find_at_most_a_fifth_of_the_pairs(sample):
    _, rows, report = sample
    written = {}
    for row in rows:
        calls = [call["function"] for call in (row.action or {}).get("tool_calls") or []]
        text = json.dumps(calls) if calls else (row.action or {}).get("content")
        written.setdefault(row.state_id, []).append(text)
    pairs = [pair for pair in report.pairs if pair["source"] == "consensus"]
    by_string = [
        pair
        for pair in pairs
        if len(set(written[pair["state_id"]])) < len(written[pair["state_id"]])
    ]
    assert len(pairs) >= 80
    assert len(by_string) <= len(pairs) / 5


def test_rejections_of_the_user_are_evidence_of_what_the_teachers_say(sample):
    _, _, report = sample
    found = [source for pair in report.pairs for source in pair.get("evidence", ())]
    assert set(found) == {"rejection"}
    assert len(found) == report.n_natural_joined


def test_every_state_can_be_reviewed(sample):
    states, _, report = sample
    shown = portion("all", report.pairs, report.outcomes)
    assert len(shown["items"]) >= len(states)
    assert len(json.dumps(shown)) < 1_250_000
