"""What a verdict says in its first sentences, and whose work is kept."""

import random
import re

import pytest

from replay_pipeline.judge.verdict import Scored, verdict
from replay_pipeline.stages.budget.verdict import told_of, words_of


def scored(rng, gain, n):
    """Draw judged decisions of a model that is ahead by `gain` on average, in runs of ten."""
    return [Scored(rng.gauss(gain, 0.3), 1.0, run=f"{gain} {number // 10}") for number in range(n)]


def of_kinds(**gains):
    """Draw 60 decisions of each kind, by the gain there."""
    rng = random.Random(1)
    return [(kind, each) for kind, gain in gains.items() for each in scored(rng, gain, 60)]


def test_a_kind_that_is_surely_worse_stays_with_the_agent_and_the_rest_is_judged():
    whole, kept = told_of(of_kinds(Bash=0.05, Write=0.05, Edit=-0.8))
    assert (whole.answer, whole.n, kept) == ("could", 120, ["Edit"])
    # What is left is less than half of the work, so the verdict is on the whole.
    whole, kept = told_of(of_kinds(Bash=0.05, Write=-0.8, Edit=-0.8))
    assert (whole.answer, whole.n, kept) == ("could not", 180, ["Edit", "Write"])


def test_chance_alone_keeps_no_kind():
    rng = random.Random(2)
    kept = [told_of([("Bash", e) for e in scored(rng, 0.0, 30)])[1] for _ in range(40)]
    assert not any(kept)


def test_a_model_that_only_talks_has_no_rest_that_it_could_do():
    talks = Scored(0.0, 1.0, only_speaks=True)
    found = [("Bash", talks)] * 60 + of_kinds(Edit=-0.8)
    whole, _ = told_of(found)
    assert whole.answer == "could not"
    assert whole.unfit


def told(answer, difference, low, high, *, who=(), n_more=None, **more):
    """Return the words of a report with these figures."""
    report = {
        "model": "z-ai/glm-4.6", "than": "claude-opus-4-5-20251101", "has_instructions": False, "unfit": None,
        "answer": answer, "difference": difference, "low": low, "high": high, "n": 150, "n_more": n_more, "n_left": 400,
        "by_kind": [{"kind": kind, "who": name} for kind, name in who], "again": None,
        "usd_per_100": 0.31, "agent_usd_per_100": 2.9, "usd_per_decision": 0.01,
    }  # fmt: skip
    return words_of(report | more)


GLM = "z-ai/glm-4.6"
PRICES = "for $0.31 instead of $2.90 per 100 decisions (89 % less)"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            told("could", -0.01, -0.06, 0.04),
            f"{GLM} could have done your work {PRICES}: it gets 1 fewer of 100 decisions right than claude-opus-4-5 "
            "(6 fewer to 4 more). Nothing speaks for keeping claude-opus-4-5.",
        ),
        (
            told("could", 0.0, -0.06, 0.04, who=[("Bash", "the model"), ("Edit", "the agent")]),
            f"{GLM} could have done your work except Edit {PRICES}: elsewhere, it gets as many of 100 decisions right as "
            "claude-opus-4-5 (6 fewer to 4 more). Keep claude-opus-4-5 for Edit.",
        ),
        (
            told("could not", -0.3, -0.4, -0.2, who=[("Bash", "the model"), ("Edit", "the agent")]),
            f"{GLM} could not have done your work: it gets 30 fewer of 100 decisions right than claude-opus-4-5 "
            f"(40 fewer to 20 fewer). Keep claude-opus-4-5 except for Bash, which {GLM} could do {PRICES}.",
        ),
        (
            told("can't tell", -0.05, -0.16, 0.06, n_more=120),
            f"150 decisions can't tell whether {GLM} could have done your work {PRICES}: it gets 5 fewer of 100 decisions "
            "right than claude-opus-4-5 (16 fewer to 6 more). Until then, keep claude-opus-4-5; about 120 more would tell, "
            "for about $1.20.",
        ),
        (
            told("could", 0.02, -0.05, 0.09, has_instructions=True, usd_per_100=5.8),
            f"{GLM} with these instructions could have done your work for $5.80 instead of $2.90 per 100 decisions "
            "(100 % more): it gets 2 more of 100 decisions right than claude-opus-4-5 (5 fewer to 9 more). Nothing speaks for "
            "keeping claude-opus-4-5.",
        ),
    ],
)  # fmt: skip
def test_five_verdicts_name_the_model_the_saving_and_the_work_to_keep(words, said):
    assert words == said


def test_more_decisions_than_there_are_are_not_promised():
    assert "about 2,905 more would tell, and your sessions have 400" in told(
        "can't tell", -0.01, -0.15, 0.13, n_more=2905
    )


def test_the_ceiling_is_claimed_only_by_enough_answers():
    for n, claims in ((10, False), (40, True)):
        again = {"n": n, "low": -0.1}
        words = told("could", -0.01, -0.06, 0.04, again=again)
        assert bool(re.search("no more than it differs from itself", words)) is claims


def test_an_interval_of_a_kind_is_tightest_at_its_own_size():
    of_kind = scored(random.Random(3), 0.0, 30)
    assert verdict(of_kind, usual=30).high < verdict(of_kind).high
