"""Samples of the model to be trained, judged against the teachers."""

import json
import random
from statistics import mean

import pytest

from replay_pipeline.judge import on_policy
from replay_pipeline.judge.on_policy import MIN_PAIRS
from replay_pipeline.publish import blind_control
from replay_pipeline.types import TeacherAction
from tests.replay_pipeline.judge.test_extract import answers, bash, call, state

READ = call("Read", file_path="tests/test_cart.py")
CONSENSUS = {"deepseek": READ, "qwen": READ}


def on_policy_pairs(*given, **options):
    """Keep pairs whatever their probability."""
    return on_policy.on_policy_pairs(*given, **{"min_p_better": 0.0, **options})


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


def test_a_sample_that_names_a_file_which_nobody_named_is_no_rejected_side():
    drawn = [
        sample(1, call("Read", file_path="src/bat.py")),
        sample(2, call("Read", file_path="a.py")),
    ]
    report = on_policy_pairs([state()], answers(**CONSENSUS), drawn)
    assert [pair["rejected"] for pair in report.pairs] == ['Read {"file_path":"a.py"}']
    assert report.outcomes == {"pair": 1, "infeasible_sample": 1}
    # What the recorded action names was in the client's own prompt, which logs lack.
    recorded = state(action=call("Read", file_path="src/bat.py"))
    assert len(on_policy_pairs([recorded], answers(**CONSENSUS), drawn).pairs) == 2


def sampled_report(favor, *, seed):
    """Sample a model at sixty sessions of six files each, of which it draws by `favor`."""
    draw = random.Random(seed)
    names = ["".join(draw.sample("abdefgiklmnorstu", 5)) for _ in range(40)]
    states, rows, drawn = [], [], []
    for number in range(60):
        files = draw.sample(names, 6)
        name = f"s{number:02}"
        shown = {"role": "user", "content": " ".join(f"src/{file}.py" for file in files)}
        states.append(state(name, session_id=name, messages=[shown]))
        right, *others = (call("Read", file_path=f"src/{file}.py") for file in files)
        rows += answers(name, deepseek=right, qwen=right)
        weights = [favor ** names.index(file) for file in files[1:]]
        picked = draw.choices(others, weights, k=4)
        drawn += [sample(n, action, state_id=name) for n, action in enumerate(picked)]
    return on_policy_pairs(states, rows, drawn)


def told_blindly(pairs):
    sides = (
        [json.dumps(pair[side]) for pair in pairs] for side in ("chosen_action", "rejected_action")
    )
    return blind_control(*sides, [pair["session_id"] for pair in pairs]).ngrams


@pytest.mark.slow
def test_favorite_names_of_a_model_do_not_tell_which_side_is_better(monkeypatch):
    reports = [sampled_report(0.6, seed=seed) for seed in range(4)]
    monkeypatch.setattr(on_policy, "balanced", list)
    every = [sampled_report(0.6, seed=seed) for seed in range(4)]
    assert mean(told_blindly(report.pairs) for report in every) > 0.65
    assert mean(told_blindly(report.pairs) for report in reports) <= 0.6
    for kept, report in zip(reports, every, strict=True):
        assert len(kept.pairs) > 0.6 * len(report.pairs)
        assert len(kept.pairs) + kept.outcomes["tells_side"] == len(report.pairs)
        assert sum(kept.outcomes.values()) == kept.n_samples == 240


@pytest.mark.slow
def test_most_pairs_of_a_model_without_favorites_stay():
    report = sampled_report(1.0, seed=1)
    assert report.outcomes["tells_side"] < len(report.pairs) / 10


def test_words_that_only_one_session_or_a_few_pairs_have_tell_nothing():
    drawn = [sample(n, bash(f"ls {n}")) for n in range(30)]
    assert len(on_policy_pairs([state()], answers(**CONSENSUS), drawn).pairs) == 30
    names = [f"s{n:02}" for n in range(MIN_PAIRS)]
    states = [state(name, session_id=name) for name in names]
    rows = [row for name in names for row in answers(name, **CONSENSUS)]
    drawn = [sample(1, bash("ls"), state_id=name) for name in names]
    assert len(on_policy_pairs(states[:-1], rows, drawn[:-1]).pairs) == MIN_PAIRS - 1
    # Twenty sessions in which `ls` is always worse: one is no more than what a coin does.
    report = on_policy_pairs(states, rows, drawn)
    assert (len(report.pairs), report.outcomes["tells_side"]) == (1, MIN_PAIRS - 1)


def test_the_pair_that_leaves_first_is_the_one_without_which_the_words_tell_least():
    dice = random.Random(1)
    pairs = [
        {
            "session_id": str(dice.randrange(4)),
            "chosen": " ".join(dice.choices("abcdef", k=3)),
            "rejected": " ".join(dice.choices("efghab", k=3)),
        }
        for _ in range(24)
    ]

    def told(kept):
        """How much more than by chance all words tell, by the definition."""
        by_word = {}
        for pair in kept:
            for word, sign in on_policy._telling_words(pair["chosen"], pair["rejected"]).items():
                sessions = by_word.setdefault(word, {})
                sessions[pair["session_id"]] = sessions.get(pair["session_id"], 0) + sign
        variances = {word: sum(n * n for n in s.values()) for word, s in by_word.items()}
        return sum(
            sum(by_word[word].values()) ** 2 / variance - 1
            for word, variance in variances.items()
            if variance
        )

    words = on_policy._WordsOfSides(pairs)
    kept = list(range(len(pairs)))
    while (place := words.most_telling()) is not None:
        without = {n: told([pairs[m] for m in kept if m != n]) for n in kept}
        assert without[place] == pytest.approx(min(without.values()))
        kept.remove(place)
        words.leave_out(place)
    assert len(kept) < len(pairs)
    assert told([pairs[n] for n in kept]) <= 1e-9
