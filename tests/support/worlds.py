"""Made-up worlds in which it is known who is right, to try what estimates who is right.

A world says how often the agent and each teacher take a right action, by kind of decision, how often
those that err take the same wrong one, and what breaks the assumptions of a simple model: states that
are hard for everybody, several right actions, a teacher that lies, two of one family, drift.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from replay_pipeline.replay import parse_gates
from replay_pipeline.settings import ReplaySettings
from replay_pipeline.types import DPOPair, Message, TeacherAction, TeacherSpec, TraceState
from tests.support.gates import bought as buy
from tests.support.gates import numbered
from tests.support.messages import call

MODELS = (
    "deepseek/deepseek-v4-pro",
    "z-ai/glm-4.6",
    "qwen/qwen3-coder",
    "mistralai/devstral",
    "moonshotai/kimi-k2",
)
"""Teachers of a world, the first of them the dearest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KindOfState:
    """One kind of decision: who is how often right there."""

    tool: str
    agent: float
    teachers: tuple[float, ...]
    share: float = 1.0
    """Weight among the kinds of a world."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """How often everybody is right, and how errors hang together."""

    kinds: tuple[KindOfState, ...]
    shared: float = 0.44
    """How often one that errs takes the wrong action that tempts all at this state."""
    same_right: float = 0.83
    """How often one that is right takes the commoner of two right actions."""
    hard_share: float = 0.0
    hard_factor: float = 0.5
    """What is left of everybody's accuracy at a hard state."""
    hard_shared: float | None = None
    """`shared` at hard states."""
    drift: float = 0.0
    """By how much the teachers' accuracy falls from the first to the last state."""
    liar: int | None = None
    """A teacher that, wherever it errs, takes the agent's action if that is wrong too."""
    copier: int | None = None
    """A teacher that takes the agent's action at six states in ten, right or wrong."""
    one_family: tuple[int, ...] = ()
    """Teachers of one family, which err alike."""
    prices: tuple[float, ...] = (4.0, 2.0, 1.0)
    """Dollars per thousand calls of each teacher."""

    @property
    def n_teachers(self) -> int:
        """How many teachers there are."""
        return len(self.kinds[0].teachers)


def _alike(agent: float, *teachers: float, **more: Any) -> World:
    return World(kinds=(KindOfState(tool="Bash", agent=agent, teachers=teachers),), **more)


_MIXED = (
    KindOfState(tool="Bash", agent=0.85, teachers=(0.85, 0.8, 0.75), share=0.4),
    KindOfState(tool="deploy", agent=0.95, teachers=(0.8, 0.75, 0.7), share=0.25),
    KindOfState(tool="forecast", agent=0.3, teachers=(0.95, 0.9, 0.85), share=0.2),
    KindOfState(tool="convert", agent=0.6, teachers=(0.7, 0.65, 0.6), share=0.15),
)

WORLDS: dict[str, World] = {
    "agent much weaker": _alike(0.3, 0.95, 0.9, 0.85),
    "equal, errors shared": _alike(0.85, 0.85, 0.85, 0.85, shared=0.8),
    "teachers weaker": _alike(0.85, 0.75, 0.7, 0.65, shared=0.5),
    "four kinds": World(kinds=_MIXED, shared=0.4),
    "four kinds, half hard": World(kinds=_MIXED, shared=0.4, hard_share=0.5, hard_shared=0.6),
    "several right actions": World(kinds=_MIXED, shared=0.4, same_right=0.6),
    "a liar": _alike(0.6, 0.85, 0.8, 0.4, liar=2),
    "two of a family": _alike(0.6, 0.85, 0.7, 0.7, shared=0.4, one_family=(1, 2)),
    "drift": World(kinds=_MIXED, shared=0.4, drift=0.3),
    "five teachers": _alike(
        0.6, 0.85, 0.8, 0.75, 0.7, 0.65, shared=0.4, prices=(16.0, 8.0, 4.0, 2.0, 1.0)
    ),
    "a copier": _alike(0.75, 0.85, 0.8, 0.8, shared=0.5, copier=2),
    "equal prices": World(kinds=_MIXED, shared=0.4, prices=(1.0, 1.0, 1.0)),
}
"""Worlds by name."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """States of a world, what every teacher would answer there, and what is right."""

    world: World
    states: list[TraceState]
    answers: dict[str, dict[str, Message]]
    """By state and model, as `TeacherServer` takes them."""
    right: dict[str, frozenset[str]]
    """Numbers of the right actions by state."""
    teachers: tuple[TeacherSpec, ...] = field(default=())

    def is_right(self, state_id: str, action: Message) -> bool:
        """Whether an action is a right one at a state."""
        return _number_of(action) in self.right[state_id]

    def is_right_pair(self, pair: DPOPair) -> bool:
        """Whether the chosen side is right and the rejected one is not."""
        chosen, rejected = pair.get("chosen_action"), pair.get("rejected_action")
        assert chosen is not None
        assert rejected is not None
        return self.is_right(pair["state_id"], chosen) and not self.is_right(
            pair["state_id"], rejected
        )

    def rows(self, states: Iterable[TraceState] | None = None) -> list[TeacherAction]:
        """Give the answers of all teachers as rows, at the world's prices."""
        chosen = self.states if states is None else states
        return [
            TeacherAction(
                state_id=state["state_id"],
                teacher=teacher.name,
                model=teacher.model,
                family=teacher.vendor,
                action=self.answers[state["state_id"]][teacher.model],
                cost_usd=price / 1_000,
            )
            for state in chosen
            for teacher, price in zip(self.teachers, self.world.prices, strict=True)
        ]


def simulate(world: World, n_states: int, *, seed: int = 0) -> Simulation:
    """Draw the states of a world and everybody's actions.

    Args:
        world: who is how often right.
        n_states: how many decision points; ten make a session, twenty sessions a project.
        seed: makes it the same each time.
    """
    chance = random.Random(seed)
    models = MODELS[: world.n_teachers]
    states: list[TraceState] = []
    answers: dict[str, dict[str, Message]] = {}
    right: dict[str, frozenset[str]] = {}
    for i in range(n_states):
        [kind] = chance.choices(world.kinds, [each.share for each in world.kinds])
        agent, *teachers = _numbers(world, kind, chance, i / n_states)
        state_id = f"s{i}"
        states.append(
            {
                "state_id": state_id,
                "session_id": f"session-{i // 10}",
                "project": f"project-{i // 200}",
                "messages": [{"role": "user", "content": f"Step {i}: what now?"}],
                "student_action": _action(kind.tool, i, agent),
                "student_model": "claude-sonnet-4-5",
                "outcome": "ok",
            }
        )
        answers[state_id] = {
            model: _action(kind.tool, i, number)
            for model, number in zip(models, teachers, strict=True)
        }
        right[state_id] = frozenset({"0", "1"})
    specs = tuple(
        TeacherSpec(
            name=model.partition("/")[2],
            model=model,
            api_key_env=None,
            family="kin" if place in world.one_family else None,
        )
        for place, model in enumerate(models)
    )
    return Simulation(world=world, states=states, answers=answers, right=right, teachers=specs)


def _numbers(world: World, kind: KindOfState, chance: random.Random, time: float) -> list[int]:
    """Draw the number of everybody's action: 0 and 1 are right, 2 tempts all, others are one's own."""
    is_hard = chance.random() < world.hard_share
    shared = world.shared if not is_hard or world.hard_shared is None else world.hard_shared
    fate = chance.random(), chance.random(), chance.random()
    found: list[int] = []
    for place, accuracy in enumerate((kind.agent, *kind.teachers)):
        is_kin = place - 1 in world.one_family
        errs, which, where = fate if is_kin else (chance.random() for _ in range(3))
        if place:
            accuracy -= world.drift * time
        if place - 1 == world.copier and chance.random() < 0.6:
            found.append(found[0])
        elif errs < accuracy * (world.hard_factor if is_hard else 1.0):
            found.append(0 if which < world.same_right else 1)
        elif place - 1 == world.liar and found[0] >= 2:
            found.append(found[0])
        else:
            own = 3 + (world.one_family[0] + 1 if is_kin else place)
            found.append(2 if where < shared else own)
    return found


_ARGUMENTS = {"Bash": "command", "deploy": "pattern", "forecast": "query", "convert": "pattern"}


def _action(tool: str, i: int, number: int) -> Message:
    return call(tool, **{_ARGUMENTS[tool]: f"make step-{i} way-{number}"})


def _number_of(action: Message) -> str:
    [made] = action["tool_calls"]
    return str(made["function"]["arguments"]).rpartition("way-")[2].rstrip('"}')


def bought(world: Simulation, usd: float) -> list[TeacherAction]:
    """Give the answers that `usd` buys as shipped, at the world's prices and without a server."""
    answers = numbered(world.states, world.teachers, world.rows())
    chosen = buy(
        world.states,
        world.teachers,
        answers,
        parse_gates(ReplaySettings().gates),
        max_total_usd=usd,
    )
    assert sum(answers[key].cost_usd for key in chosen) < usd + 1e-9
    return [answers[key] for key in chosen]
