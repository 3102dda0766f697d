"""What is said before paying, held to what came of it in worlds in which it is known who is right."""

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from replay_pipeline.replay import estimate, parse_gates, replay_states
from replay_pipeline.replay.buy.estimates import Plan, what_is_left
from replay_pipeline.replay.buy.lanes import lanes_of
from replay_pipeline.replay.dialects.base import RequestOptions
from replay_pipeline.replay.dialects.prices import Price
from replay_pipeline.replay.dialects.sizes import Learned
from replay_pipeline.types import MIN_P_BETTER
from tests.replay_pipeline.replay.test_gates import TEACHERS, answers_of, make_state
from tests.support.teachers import TeacherServer
from tests.support.votes import extract_pairs
from tests.support.worlds import MODELS, WORLDS, KindOfState, World, simulate

ROOT = Path(__file__).parents[3]
PRICE = {"prompt": 1e-5, "completion": 4e-5, "input_cache_read": 1e-6}


def left(states, teachers, rows, gates=(), learned=None, min_p_better=MIN_P_BETTER, **more):
    """What is left, if `rows` are in the ledger."""
    places = []
    lanes = lanes_of(states, teachers, RequestOptions(), places)
    known = {(row.state_id, row.teacher): row for row in rows}

    def row_of(task):
        row = known.get((task.state_id, task.teacher.name))
        return (lambda: row) if row else None

    dearness = {teacher.name: n for n, teacher in enumerate(teachers, 1)}
    plan = Plan(
        states=states, teachers=teachers, lanes=lanes, places=places, find=row_of,
        policy=parse_gates(gates, min_p_better=min_p_better),
        prices={name: Price.of({k: v * n for k, v in PRICE.items()}) for name, n in dearness.items()},
        learned={name: learned or Learned() for name in dearness},
    )  # fmt: skip
    return what_is_left(plan, **more)


def test_bills_and_counts_were_inside_and_the_page_says_how_wide():
    rows = json.loads((ROOT / "benchmarks" / "results" / "estimate.json").read_text("utf-8"))
    page = (ROOT / "docs" / "replay.md").read_text("utf-8")
    assert all(row["inside"] >= 0.9 for row in rows)
    for when in ("before", "after"):
        widths = {row["what"]: row["width"] for row in rows if row["when"] == when}
        assert widths["bill"] <= {"before": 3.0, "after": 1.5}[when]
        assert max(widths.values()) <= 3.0
    told = (
        f"After 200 answers, the interval of dollars ends at {widths['bill']:.2f} times its beginning, "
        f"and the interval of pairs at {widths['pairs']:.2f} times"
    )
    assert told in " ".join(page.split())


def test_the_next_teacher_is_expected_where_the_rule_for_pairs_says_so():
    for votes in itertools.chain.from_iterable(
        itertools.product([0, 1, 2, None], repeat=n) for n in (1, 2)
    ):
        state, policy = make_state(0), parse_gates(["cheap_first"])
        rows = answers_of([state], [votes + (None,) * (3 - len(votes))])[: len(votes)]
        poll = policy.poll(state)
        for row in rows:
            poll.add(row)
        is_hopeless = poll.is_hopeless({teacher.vendor for teacher in TEACHERS[len(votes) :]})
        found = left([state], TEACHERS, rows, ["cheap_first"])
        assert (found.n_calls == 0) is is_hopeless, votes
        assert left([state], TEACHERS, rows).n_calls == 3 - len(votes)


def test_nothing_is_left_where_everything_is_known():
    states = [make_state(i) for i in range(4)]
    found = left(states, TEACHERS, answers_of(states, [(1, 1, 2)] * 4))
    assert (found.n_calls, found.n_states, found.high_usd, found.pairs) == (0, 0, 0, (0, 0))


def test_what_a_teacher_has_counted_decides_the_dollars():
    """A quarter of a token a byte, answers of 30 tokens, and no cache hit but the one in two."""
    told = "x" * 40_000
    states = [
        {**make_state(i), "session_id": "s", "messages": [{"role": "user", "content": told}]}
        for i in range(200)
    ]
    for i, state in enumerate(states):
        state["messages"] = [*state["messages"], {"role": "user", "content": f"step {i}"}]
    for share, usd in ((0.0, 0.1012), (1.0, 0.1012)):
        learned = Learned(
            n=10_000, n_bytes=10**9, n_tokens=250 * 10**6, n_answers=10_000, n_answer_tokens=300_000,
            n_expected_cached=10**9, n_cached=int(share * 10**9),
        )  # fmt: skip
        found = left(states, TEACHERS[:1], [], learned=learned)
        # Each prompt is another one, so that no cache serves it: 10,020 tokens and 30.
        assert found.expected_usd / 200 == pytest.approx(usd, rel=0.02)
        assert found.high_usd < 1.2 * found.low_usd
    begun = [{**state, "messages": state["messages"][:1]} for state in states[:1]]
    both = [*begun, {**states[0], "state_id": "next"}]
    [row] = left(both, TEACHERS[:1], [], learned=learned).teachers
    assert row.n_cached_tokens == pytest.approx(10_010, rel=0.02)


def test_more_answers_make_the_interval_narrower_and_a_ceiling_pays_for_a_part():
    world = simulate(WORLDS["four kinds"], 500, seed=0)
    widths, n_calls = [], []
    for n in (0, 240):
        found = left(
            world.states, world.teachers, world.rows(world.states[:n]), ["cheap_first"],
            ceiling_usd=0.3,
        )  # fmt: skip
        agreed = [found.pairs[end] + found.lessons[end] for end in (0, 1)]
        widths.append((agreed[1] - agreed[0]) / found.n_states)
        n_calls.append(found.n_calls)
        assert 0 < found.covered.n_states < found.n_states
        assert found.covered.high_usd <= 0.3
        for what in ("pairs", "lessons", "positives"):
            assert getattr(found.covered, what)[1] <= getattr(found, what)[1]
    assert widths == sorted(widths, reverse=True)
    assert n_calls == sorted(n_calls, reverse=True)


def test_money_for_a_part_buys_answers_at_more_states_if_these_come_first():
    world = simulate(WORLDS["four kinds"], 500, seed=0)
    wide, deep = (
        left(world.states, world.teachers, [], [gate], ceiling_usd=0.02).covered
        for gate in ("wide_first", "cheap_first")
    )
    assert wide.n_states > 1.5 * deep.n_states
    assert wide.answers[0] > 0 == wide.pairs[1]
    assert wide.high_usd <= 0.02


def test_pairs_and_lessons_are_told_apart_by_the_minimum_of_the_settings():
    """Without a minimum, all that teachers agree on against the agent makes pairs, as `pairs` has it."""
    world = simulate(WORLDS["four kinds"], 400, seed=0)
    for n in (0, 200):
        sure, every = (
            left(world.states, world.teachers, world.rows(world.states[:n]), min_p_better=minimum)
            for minimum in (MIN_P_BETTER, 0.0)
        )
        assert sure.lessons[1] > 0
        assert every.lessons == (0, 0)
        assert every.pairs[0] > sure.pairs[1]
        assert every.pairs_right[0] < sure.pairs_right[0]
        assert every.n_calls == sure.n_calls
        assert every.expected_usd == pytest.approx(sure.expected_usd, rel=0.03)
    truly = extract_pairs(world.states[200:], world.rows(world.states[200:])).pairs
    assert every.pairs[0] <= len(truly) <= every.pairs[1]


def test_it_is_said_where_the_teachers_can_teach_this_agent():
    weaker, stronger = (0.85, (0.75, 0.7, 0.65), 0.5), (0.3, (0.95, 0.9, 0.85), 0.0)
    for (agent, teachers, shared), tool, words, advice in (
        (weaker, "forecast", "your teachers are weaker than the model that wrote these sessions at forecast, stronger at nothing", "don't buy"),
        (stronger, "forecast", "your teachers are stronger at forecast", "buy and train on what they say"),
        # Nobody knows that a command is wrong because teachers would run another one.
        (stronger, "Bash", "your teachers are about as strong as the model that wrote these sessions", "teachers that are as good"),
    ):  # fmt: skip
        kind = KindOfState(tool=tool, agent=agent, teachers=teachers)
        world = simulate(World(kinds=(kind,), shared=shared), 1_000, seed=0)
        said = left(world.states, world.teachers, world.rows()).words
        assert said[0] == words
        assert said[1].startswith(advice)


@pytest.mark.slow
def test_bills_fall_into_the_estimate_over_the_wire(tmp_path):
    n_within, worlds = 0, [*WORLDS.items()][::2]
    for name, each in worlds:
        world = simulate(each, 60, seed=3)
        with TeacherServer(world.answers) as server:
            teachers, ledger = server.teachers(MODELS[: each.n_teachers]), tmp_path / name

            options = {"max_total_usd": 5, "ledger": ledger, "is_durable": False}
            asyncio.run(replay_states(world.states[:30], teachers, **options))
            said = estimate(world.states, teachers, ledger=ledger)
            report = asyncio.run(replay_states(world.states, teachers, **options))
        assert said.n_answered == 30
        assert said.n_calls == report.n_sent
        n_within += said.low_usd <= report.newly_spent_usd <= said.high_usd
    assert n_within >= 0.8 * len(worlds)
