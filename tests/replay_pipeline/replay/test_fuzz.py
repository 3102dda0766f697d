import pytest

from tests.support.fuzz_replies import fuzz


@pytest.mark.slow
def test_mutated_replies_cost_no_other_answer_and_every_later_run_works():
    became = fuzz(n_examples=4, n_replies=60)
    assert sum(became.values()) >= 200
    assert {fate for _, fate in became} > {"answered", "outcome_unknown", "malformed_arguments"}
