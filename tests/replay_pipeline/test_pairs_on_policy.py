"""Samples of the model to be trained, judged against the teachers."""

import json

import pytest

from replay_pipeline.pairs import on_policy_pairs
from replay_pipeline.types import TeacherAction
from tests.replay_pipeline.test_pairs_extract import answers, bash, call, state

READ = call("Read", file_path="tests/test_cart.py")
CONSENSUS = {"deepseek": READ, "qwen": READ}


def sample(number, action=None, *, state_id="s1", error=None):
    return TeacherAction(
        state_id=state_id, teacher=f"trainee:{number}", action=action, error_code=error
    )


def test_a_sample_that_differs_is_rejected_and_one_that_agrees_is_a_positive():
    report = on_policy_pairs(
        [state()], answers(**CONSENSUS), [sample(1, bash("ls")), sample(2, READ)]
    )
    [pair], [positive] = report.pairs, report.positives
    assert pair["rejected_source"] == "sampled"
    assert pair["rejected"] == 'Bash {"command":"ls"}'
    assert pair["chosen"] == 'Read {"file_path":"tests/test_cart.py"}'
    assert positive["state_id"] == "s1"
    assert report.to_json()["agreement_rate"] == 0.5


def test_every_sample_is_counted_and_each_pair_is_made_once():
    recorded = on_policy_pairs([state()], answers(**CONSENSUS), [sample(1, bash("pytest"))]).pairs
    drawn = [
        sample(1, bash("ls")),
        sample(2, bash("ls")),
        sample(3, READ),
        sample(4, READ),
        sample(5, error="cut_off"),
        sample(6, bash("pytest")),
        sample(7, call("Edit", file_path="tests/test_cart.py")),
    ]
    report = on_policy_pairs(
        [state()],
        answers(**CONSENSUS),
        drawn,
        known_pairs={pair["pair_id"] for pair in recorded},
    )
    figures = report.to_json()
    assert figures["errors"] == {"cut_off": 1}
    assert figures["n_samples"] == 7 == sum(report.outcomes.values()) + 1
    made = report.outcomes["pair"] + report.outcomes["agreement"]
    assert made == len(report.pairs) + len(report.positives) + report.n_repeated
    # The second `ls`, the second agreement, and the pair that the record had made.
    assert report.n_repeated == 3


@pytest.mark.parametrize("known", [set(), {"s1"}])
def test_a_positive_of_the_record_is_not_made_again(known):
    report = on_policy_pairs(
        [state()], answers(**CONSENSUS), [sample(1, READ)], known_positives=known
    )
    assert len(report.positives) == 1 - len(known)
    assert report.n_repeated == len(known)


def test_the_figures_of_samples_are_plain_json():
    rewound = state("s2", bash("tox"), outcome="rewound", alternatives=[bash("make")])
    drawn = [
        sample(2, READ),
        sample(1, bash("ls")),
        sample(3, bash("ls")),
        sample(1, bash("ls"), state_id="s2"),
        sample(4, bash("ls"), error="cut_off"),
        sample(5, error="cut_off"),
        sample(6),
        sample(7, bash("ls"), state_id="elsewhere"),
    ]
    rows = [*answers(**CONSENSUS), *answers("s2", qwen=READ)]
    report = on_policy_pairs([state(), rewound, state("s3")], rows, drawn)
    assert report.to_json() == {
        "n_states": 3,
        "n_samples": 8,
        "n_pairs": 1,
        "n_positives": 1,
        "n_repeated": 1,
        "errors": {"cut_off": 2, "no_action": 1},
        "forms": {"chosen": {"Read": 1}, "rejected": {"Bash": 1}},
        "advice": None,
        "outcomes": {"pair": 2, "agreement": 1, "too_few_answers": 1},
        "agreement_rate": 0.25,
    }
    assert [pair["source"] for pair in report.pairs] == ["consensus"]


def test_the_share_of_samples_that_agree_is_unknown_without_any():
    def rate(*drawn):
        report = on_policy_pairs([state()], answers(**CONSENSUS), drawn)
        return report.to_json()["agreement_rate"]

    assert rate() is None
    assert rate(sample(1, error="502")) is None
    assert rate(sample(1, bash("ls"))) == 0.0
    assert rate(sample(1, READ)) == 1.0


def test_samples_are_judged_with_the_threshold_and_the_options_of_an_extraction():
    def outcomes(*more, **options):
        drawn = [sample(1, bash("pytest -x"))]
        rows = answers(a=bash("pytest"), b=bash("pytest"))
        return on_policy_pairs([state()], rows, drawn, *more, **options).outcomes

    assert outcomes() == outcomes(2) == {"pair": 1}
    assert outcomes(3) == {"too_few_answers": 1}
    assert outcomes(level="target") == {"agreement": 1}


def test_samples_come_out_in_one_order_whoever_is_first():
    drawn = [sample(2, bash("make")), sample(1, bash("ls")), sample(3, bash("tox"))]
    orders = (drawn, drawn[::-1])
    found = [on_policy_pairs([state()], answers(**CONSENSUS), order).pairs for order in orders]
    assert found[0] == found[1]
    commands = [json.loads(pair["rejected"].removeprefix("Bash "))["command"] for pair in found[0]]
    assert commands == ["ls", "make", "tox"]


def says(text):
    return {"role": "assistant", "content": text}


def test_a_text_where_a_call_is_due_is_no_rejected_side():
    drawn = [sample(1, says("blorp qua zim")), sample(2, says("I am done.")), sample(3, bash("ls"))]
    report = on_policy_pairs([state()], answers(**CONSENSUS), drawn)
    assert [pair["rejected"] for pair in report.pairs] == ['Bash {"command":"ls"}']
    assert report.outcomes == {"pair": 1, "other_form": 2}
    assert report.to_json()["forms"]["rejected"] == {"Bash": 1}


def test_a_model_that_does_not_answer_with_calls_is_to_be_trained_on_chosen_first():
    cut = [sample(number, error="cut_off") for number in range(9)]
    report = on_policy_pairs([state()], answers(**CONSENSUS), [*cut, sample(9, says("zim"))])
    assert report.pairs == []
    assert report.advice.startswith("0 of 10 samples are whole calls")
    assert "Train on `chosen` first" in report.advice
    able = on_policy_pairs([state()], answers(**CONSENSUS), [sample(1, bash("ls"))])
    assert able.advice is None
    assert on_policy_pairs([], [], []).advice is None
