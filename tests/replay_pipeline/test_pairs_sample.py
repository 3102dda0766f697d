"""The bundled sample: the outcomes are those that its authors meant, and format does not matter."""

import json
from pathlib import Path

import pytest

from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.pairs import extract_pairs
from replay_pipeline.review import show_state, write_review
from replay_pipeline.testing.sample import ANSWERS_FILE, SESSIONS_DIR
from replay_pipeline.types import TeacherAction

EXPECTED = json.loads(
    (Path(__file__).parents[2] / "recipes" / "sample" / "expected.json").read_text("utf-8")
)


@pytest.fixture(scope="module")
def sample():
    states = list(ClaudeCodeIngester().ingest(SESSIONS_DIR))
    rows = []
    for line in ANSWERS_FILE.read_text("utf-8").splitlines():
        one = json.loads(line)
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


AGAINST_A_PAIR = {"deferred": 22, "early_stop": 9, "infeasible": 2}
"""States at which the teachers agree on something else, as their authors meant, and what prompt and
record say is no pair all the same."""


def test_outcomes_are_the_intended_ones(sample):
    _, _, report = sample
    names = {"agreement": "agrees_with_student", **dict.fromkeys(AGAINST_A_PAIR, "pair")}
    found = {row["state_id"]: names.get(row["outcome"], row["outcome"]) for row in report.outcomes}
    assert found.keys() == EXPECTED.keys()
    wrong = [state_id for state_id in found if found[state_id] != EXPECTED[state_id]["outcome"]]
    assert wrong == []
    assert AGAINST_A_PAIR.items() <= report.outcome_counts.items()


def test_the_teachers_that_agree_are_the_intended_ones(sample):
    _, _, report = sample
    for pair in report.pairs:
        if pair["source"] == "consensus":
            assert pair["teachers_agreeing"] == sorted(EXPECTED[pair["state_id"]]["teachers"])


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


def test_every_state_can_be_shown_and_reviewed(sample, tmp_path):
    states, rows, report = sample
    known = {"pairs": report.pairs, "outcomes": report.outcomes, "teacher_actions": rows}
    for state in states[:20]:
        assert state["state_id"] in show_state(state["state_id"], states=states, **known)
    page = write_review(report.pairs, path=tmp_path / "r.html", outcomes=report.outcomes)
    assert page.stat().st_size < 1_000_000
