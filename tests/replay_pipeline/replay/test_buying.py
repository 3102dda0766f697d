"""What is bought, where, and in which order, in worlds in which it is known who is right."""

import threading
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from replay_pipeline.actions import canonical_action
from replay_pipeline.replay import parse_gates, replay_in_thread
from replay_pipeline.replay.buy import buying
from replay_pipeline.replay.buy.places import Place, spread
from replay_pipeline.types import family_of_model
from tests.support.gates import bought, numbered
from tests.support.teachers import TeacherServer
from tests.support.votes import extract_pairs
from tests.support.worlds import MODELS, WORLDS, KindOfState, World, simulate

USD = 0.08
"""Enough for a fifth of the questions."""


@pytest.fixture(scope="module")
def world():
    return simulate(WORLDS["four kinds"], 2_000, seed=0)


def replay(world, ledger, gates, **options):
    """Replay at a server of its own: one that has answered before answers again for nothing."""
    options = {"max_total_usd": USD, "is_durable": False} | options
    params = options.pop("params", {})
    with TeacherServer(world.answers) as server:
        teachers = server.teachers(MODELS[:3])
        return replay_in_thread(
            options.pop("states", world.states),
            [each.model_copy(update={"params": params}) for each in teachers],
            ledger=ledger, gates=gates, tick_s=0.05, **options,
        )  # fmt: skip


def calls(report):
    return {(action.state_id, action.teacher) for action in report.actions}


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_buy_what_an_undisturbed_one_buys(world, tmp_path):
    n_states, gates = 500, ("cheap_first:0.1",)
    options = {"states": world.states[:n_states], "max_total_usd": USD / 4}
    whole = replay(world, tmp_path / "whole", gates, **options)
    assert 0 < len(whole.actions) < 2 * n_states
    stop = threading.Event()

    def stop_midway(progress):
        if progress.n_done > len(whole.actions) // 2:
            stop.set()

    ledger = tmp_path / "halves"
    first = replay(world, ledger, gates, stop=stop, tick=stop_midway, **options)
    assert first.stop_reason == "stopped"
    assert calls(first) < calls(whole)
    again = replay(world, ledger, gates, **options)
    assert calls(again) == calls(whole)
    assert again.n_sent == len(whole.actions) - len(first.actions)
    assert again.spent_usd == pytest.approx(whole.spent_usd)


@pytest.mark.parametrize("max_tokens", [64, 1024])
def test_money_for_a_part_ends_the_states_that_it_begins(world, tmp_path, max_tokens):
    states, params = world.states[:500], {"max_completion_tokens": max_tokens}
    options = {"states": states, "max_total_usd": USD / 4, "params": params}
    report = replay(world, tmp_path / "l", ("cheap_first",), **options)
    assert report.stop_reason == "budget"
    policy, by_state = parse_gates(["cheap_first"]), defaultdict(list)
    for action in report.actions:
        by_state[action.state_id].append(action)

    def is_open(state):
        poll = policy.poll(state)
        for action in by_state[state["state_id"]]:
            poll.add(action)
        left = set(MODELS[:3]) - {action.model for action in by_state[state["state_id"]]}
        return 0 < len(left) < 3 and not poll.is_hopeless({family_of_model(m) for m in left})

    assert sum(map(is_open, states)) <= 3
    everybody = replay(world, tmp_path / "all", (), **options)
    assert len(by_state) > 1.2 * len({state_id for state_id, _ in calls(everybody)}) >= 90
    in_turn, in_order = (
        sum(map(world.is_right_pair, extract_pairs(states, each.actions).pairs))
        for each in (report, everybody)
    )
    assert in_turn > 1.3 * in_order


def test_a_first_answer_everywhere_comes_before_a_second_one_anywhere(world, tmp_path):
    """Money for a part buys more right actions to imitate than states that are ended one by one."""
    options, right = {"states": world.states[:500], "max_total_usd": USD / 8}, {}
    for gate in ("wide_first", "cheap_first"):
        report = replay(world, tmp_path / gate, (gate,), **options)
        by_teacher = Counter(action.teacher for action in report.actions)
        lessons = extract_pairs(world.states[:500], report.actions).positives
        acts = [(row["state_id"], row["action_message"]) for row in lessons]
        right[gate] = sum(world.is_right(*each) for each in acts)
        if gate == "wide_first":
            assert report.stop_reason == "budget"
            assert len(by_teacher) == 1
    assert right["wide_first"] > 1.5 * right["cheap_first"]


def test_enough_money_buys_the_same_in_either_order(world, tmp_path):
    options = {"states": world.states[:200], "max_total_usd": 10 * USD}
    wide, deep = (
        calls(replay(world, tmp_path / kind, (f"{kind}_first:0.1",), **options))
        for kind in ("wide", "cheap")
    )
    # Which of the states that nobody needs to end are explored is drawn by the gate's name.
    assert abs(len(wide) - len(deep)) < 0.05 * len(deep)
    assert len({state_id for state_id, _ in wide}) == 200


def places(sizes):
    return [
        Place(session=f"{project}-{i // 40}", project=f"{project}", kind="Bash")
        for project, n_states in enumerate(sizes)
        for i in range(n_states)
    ]


def test_the_order_covers_projects_sessions_and_time_from_its_start():
    found = places([800, 300, 100, 50, *[10] * 8])
    order = spread(found)
    assert sorted(i for run in order for i in run) == list(range(len(found)))
    assert [found[run[0]].project for run in order[:12]] == [f"{n}" for n in range(12)]
    of_largest = [found[run[0]].session for run in order if found[run[0]].project == "0"]
    assert len(set(of_largest[:20])) == 20  # every session once before any twice
    halves = Counter(int(session.partition("-")[2]) >= 10 for session in of_largest[:10])
    assert halves[True] == halves[False] == 5
    assert all(run == list(range(run[0], run[0] + len(run))) for run in order)


@pytest.mark.slow
def test_money_for_a_part_reaches_all_projects(tmp_path):
    """Twelve projects of unequal size, and money for a tenth: before, four sessions had it all."""
    sizes = [400, 200, 100, 60, 40, 30, 20, 10, 10, 10, 10, 10]
    world = simulate(WORLDS["four kinds"], sum(sizes), seed=1)
    for state, place in zip(world.states, places(sizes), strict=True):
        state |= {"session_id": place.session, "project": place.project}
    report = replay(world, tmp_path / "l", (), max_total_usd=0.03)
    asked = {action.state_id for action in report.actions}
    assert report.stop_reason == "budget"
    projects = {state["project"] for state in world.states if state["state_id"] in asked}
    assert len(projects) >= 10
    assert report.coverage["projects"] == {"asked": len(projects), "all": 12}


def test_what_a_teacher_confirms_that_copies_the_agent_is_put_to_a_second_one(monkeypatch):
    """Where the cheapest takes the agent's action at six states in ten, right or wrong."""
    for name, is_doubted in (("a copier", True), ("four kinds", False)):
        world = simulate(WORLDS[name], 1_000, seed=0)
        answers = numbered(world.states, world.teachers, world.rows())
        offer = world.states, world.teachers, answers, parse_gates(["cheap_first:0.1"])
        chosen = bought(*offer)
        rows = [replace(answers[key], propensity=p) for key, p in chosen.items()]
        (n_once, once), (_, everybody) = (lessons(world, each) for each in (rows, world.rows()))
        assert once > everybody - 0.02
        assert len(chosen) < 2_300
        with monkeypatch.context() as patch:
            patch.setattr(buying, "copies_agent", lambda *_: False)
            trusting = bought(*offer)
        if not is_doubted:
            assert chosen == trusting
            continue
        assert len(chosen) > len(trusting) + 500
        rows = [replace(answers[key], propensity=p) for key, p in trusting.items()]
        assert lessons(world, rows)[0] < n_once / 4  # what it confirmed alone is too unsure


def lessons(world, rows):
    """The number of lessons and confirmed actions, and the share that is right."""
    found = [row for row in extract_pairs(world.states, rows).positives if row["kind"] != "answer"]
    right = [world.is_right(row["state_id"], row["action_message"]) for row in found]
    return len(found), sum(right) / len(found)


def test_what_a_copying_teacher_confirmed_is_said_to_be_as_unsure_as_it_is():
    """As where nobody else can be asked to confirm, so that its positives stay."""
    claimed = {}
    for name, copier in (("copies", 2), ("thinks", None)):
        kinds = (KindOfState(tool="Bash", agent=0.6, teachers=(0.85, 0.8, 0.8)),)
        world = simulate(World(kinds=kinds, shared=0.5, copier=copier), 1_000, seed=0)
        answers = numbered(world.states, world.teachers, world.rows())
        cheap = world.teachers[2].name
        rows = [
            replace(answers[i, j], propensity=1.0 if teacher.name == cheap else 0.1)
            for i in range(1_000)
            for j, teacher in enumerate(world.teachers)
            if teacher.name == cheap or i % 10 == 0
        ]
        taken = {
            state["state_id"]: canonical_action(state["student_action"]) for state in world.states
        }
        once = [
            row
            for row in extract_pairs(world.states, rows).positives
            if row["n_teachers_agreeing"] == 1
            and canonical_action(row["action_message"]) == taken[row["state_id"]]
        ]
        claimed[name] = sum(row["p_chosen_right"] for row in once) / len(once)
        true = sum(world.is_right(r["state_id"], r["action_message"]) for r in once) / len(once)
        assert claimed[name] == pytest.approx(true, abs=0.1)
    assert claimed["copies"] < claimed["thinks"] - 0.1
