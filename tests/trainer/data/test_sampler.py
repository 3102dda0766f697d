import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.sampler import PairSampler, groups_of
from trainer.settings import SharedSettings


@given(
    n_pairs=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 5),
    n_groups=st.integers(1, 6),
)
def test_every_epoch_sees_every_pair_once(n_pairs, batch_size, seed, n_groups):
    groups = [i % n_groups for i in range(n_pairs)]
    sampler = PairSampler(n_pairs, batch_size=batch_size, seed=seed, groups=groups)
    drawn = [i for step in range(2 * n_pairs) for i in sampler.step(step)]
    for epoch in range(len(drawn) // n_pairs):
        assert sorted(drawn[epoch * n_pairs : (epoch + 1) * n_pairs]) == list(range(n_pairs))


def test_a_step_depends_on_nothing_but_its_number():
    used, fresh = PairSampler(10, batch_size=3, seed=2), PairSampler(10, batch_size=3, seed=2)
    for step in range(20):
        used.step(step)
    assert fresh.step(13) == used.step(13)
    assert PairSampler(10, batch_size=3, seed=3).step(13) != fresh.step(13)


def test_pairs_of_a_session_stay_together():
    groups = [i % 3 for i in range(12)]
    sampler = PairSampler(12, batch_size=4, seed=0, groups=groups)
    for step in range(3):
        assert len({groups[i] for i in sampler.step(step)}) == 1


def test_no_session_fills_many_steps_in_a_row():
    groups = ["long"] * 400 + ["short"] * 400
    sampler = PairSampler(800, batch_size=4, seed=0, groups=groups)
    seen = ["".join(sorted({groups[i][0] for i in sampler.step(step)})) for step in range(200)]
    longest = max(len(list(run)) for _, run in itertools.groupby(seen))
    assert longest < 20


def prefers(chosen, rejected, session):
    sides = {
        name: [{"role": "assistant", "content": content}]
        for name, content in (("chosen", chosen), ("rejected", rejected))
    }
    return {**sides, "session_id": session}


def test_pairs_of_two_actions_that_both_win_somewhere_are_one_group():
    rows = [
        prefers("a", "b", "first"),
        prefers("b", "a", "second"),
        prefers("a", "c", "first"),
        prefers("a", "c", "second"),
    ]
    by_actions = groups_of(rows, "actions")
    assert by_actions[0] == by_actions[1]
    assert by_actions[2:] == groups_of(rows)[2:] == ["session:first", "session:second"]
    assert groups_of([{}, {}]) == ["session:0", "session:1"]


def test_rows_that_imitate_one_action_are_no_group():
    rows = [prefers("done", "done", session) for session in ("first", "second")]
    assert groups_of(rows, "actions") == groups_of(rows) == ["session:first", "session:second"]


@pytest.mark.parametrize(
    ("n_pairs", "n_steps"), [(4, 10), (20, 50), (240, 300), (400, 300), (1200, 300), (5000, 1250)]
)
def test_steps_follow_from_the_dataset(n_pairs, n_steps):
    """Ten epochs of few pairs at most, one of many at least, 1,200 pairs in between."""
    assert SharedSettings(pair_visits=1200, pairs_per_step=4).steps_for(n_pairs) == n_steps
    assert SharedSettings(pair_visits=1200, max_steps=7).steps_for(n_pairs) == 7
    assert SharedSettings().steps_for(n_pairs) == -1
