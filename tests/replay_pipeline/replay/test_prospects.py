"""What is said before paying, held to what came of it in worlds in which it is known who is right."""

import asyncio

import pytest

from replay_pipeline.judge.extract import extract_pairs
from replay_pipeline.replay import estimate, replay_states
from replay_pipeline.replay.ask.asking import Asking
from replay_pipeline.replay.buy.estimates import prospect
from tests.support.teachers import TeacherServer
from tests.support.worlds import MODELS, WORLDS, simulate


def right_per_state(world, states):
    pairs = extract_pairs(states, world.rows(states)).pairs
    return sum(map(world.is_right_pair, pairs)) / len(states)


def said_after(world, n_asked):
    rows = {number: world.rows([state]) for number, state in enumerate(world.states[:n_asked])}
    return prospect(world.states, world.teachers, rows, Asking().policy())


def test_right_pairs_fall_into_the_interval_in_nine_worlds_of_ten():
    hits, n = {"assumed": 0, "seen": 0}, 0
    for name, each in WORLDS.items():
        for seed in range(2):
            world = simulate(each, 700, seed=seed)
            found = right_per_state(world, world.states[200:])
            for when, n_asked in (("assumed", 0), ("seen", 200)):
                said = said_after(world, n_asked)
                assert said.n_states == n_asked, name
                hits[when] += said.low <= found <= said.high
            n += 1
    assert hits["assumed"] >= 0.9 * n
    assert hits["seen"] >= 0.9 * n


def test_answers_make_the_interval_narrower():
    world = simulate(WORLDS["four kinds"], 700, seed=0)
    widths = [(said := said_after(world, n)).high - said.low for n in (0, 60, 240)]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 3 * widths[2]


def test_it_is_said_where_the_teachers_can_teach_this_agent():
    for name, words, advice in (
        ("teachers weaker", "your teachers are weaker than the model that wrote these sessions at Bash, stronger at nothing", "don't buy"),
        ("agent much weaker", "your teachers are stronger at Bash", "buy agreement and train on it"),
    ):  # fmt: skip
        said = said_after(simulate(WORLDS[name], 1_000, seed=0), 1_000).words
        assert said[0] == words
        assert said[1].startswith(advice)


@pytest.mark.slow
def test_bills_fall_into_the_estimate_over_the_wire(tmp_path):
    n_within = 0
    for name, each in WORLDS.items():
        world = simulate(each, 60, seed=3)
        with TeacherServer(world.answers) as server:
            teachers, ledger = server.teachers(MODELS[: each.n_teachers]), tmp_path / name
            asyncio.run(
                replay_states(
                    world.states[:30], teachers, max_total_usd=5, ledger=ledger, is_durable=False
                )
            )
            said = estimate(world.states, teachers, ledger=ledger)
            report = asyncio.run(
                replay_states(
                    world.states, teachers, max_total_usd=5, ledger=ledger, is_durable=False
                )
            )
        assert said.prospect.n_states == 30
        n_within += said.low_usd <= report.newly_spent_usd <= said.high_usd
    assert n_within >= 0.9 * len(WORLDS)
