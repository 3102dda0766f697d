"""Samples of the model to be trained, judged against the teachers."""

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
