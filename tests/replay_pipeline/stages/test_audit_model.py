"""What is checked of a trained model, by the report that its trainer leaves."""

import json

import pytest

from replay_pipeline.stages.train import MODEL_CHECKS

GOOD = {
    "acts_worse": False,
    "learned": True,
    "findings": [],
    "held_out_states": 60,
    "held_out_pairs": 40,
    "consensus_rate_before": 0.5,
    "consensus_rate_after": 0.6,
    "preference_accuracy_after": 0.8,
}
WORSE = "the model takes the consensus action at 2 of 60 held-out states: it acts worse"
NOTHING = "nothing was learned: the model ranks every held-out pair as it did before training"


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        ({}, {}),
        ({"acts_worse": True, "findings": [WORSE]}, {"acts_as_well_as_before": WORSE}),
        ({"learned": False, "findings": [NOTHING]}, {"something_was_learned": NOTHING}),
    ],
)
def test_a_check_fails_with_the_sentence_of_the_report(tmp_path, changed, failing):
    (tmp_path / "report.json").write_text(json.dumps(GOOD | changed))
    found = {name: look(tmp_path) for name, look in MODEL_CHECKS.items()}
    told = {name: verdict.problems[0] for name, verdict in found.items() if not verdict.holds}
    assert told == failing
    assert found["acts_as_well_as_before"].facts["consensus_rate_after"] == 0.6
    assert all(verdict.judged for verdict in found.values())


@pytest.mark.parametrize("report", [None, {"steps": 3}, {"learned": None, "findings": []}])
def test_what_was_not_measured_is_judged_by_nobody(tmp_path, report):
    if report is not None:
        (tmp_path / "report.json").write_text(json.dumps(report))
    for look in MODEL_CHECKS.values():
        verdict = look(tmp_path)
        assert (verdict.holds, verdict.judged) == (True, 0)
        assert "Judged nothing" in verdict.message()
