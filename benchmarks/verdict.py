"""Does the verdict on two models agree with the scores that their answers got?

    python benchmarks/verdict.py ANSWERS QUESTIONS [--draws 300] [--size 150] [--seed 7] [--json FILE] [--learn]

ANSWERS and QUESTIONS are those of `benchmarks/scored_answers.py`. So often as --draws says, two models are drawn as agent
and candidate, three of other makers as the panel, and --size questions. The product's verdict sees their answers alone; how
likely an answer is right is learned again without the makers of both. Printed is how often the interval
holds the true difference of their scores over all questions, how often the sign is right where they differ by .05 or more,
and how often "could" and "could not" are wrong. `--learn` writes `replay_pipeline/judge/verdict.toml` from all models.

    git clone https://github.com/NJU-LINK/CodeTracer SESSIONS
    python benchmarks/verdict.py --sessions SESSIONS/data/traj/claude_code

Each folder there has the sessions of one model at the same tasks, with the results of tests. Every model is compared with
each other one by the first consequence of its sessions, the rest being the panel, beside how many tasks each solved.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, permutations
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.real_models import regression
from benchmarks.scored_answers import (
    Answers,
    action_of,
    maker,
    message_of,
    questions,
    runs,
    share,
    state_of,
)
from replay_pipeline.actions import Action, agreement_level, agrees_at, canonical_action
from replay_pipeline.judge.verdict import MARGIN, features, judged, verdict

N_PANEL = 3
_N_LEARNED = 12_000
"""Answers that coefficients are learned from: more change nothing."""
_APART = 0.05


class World:
    """The answers of all models that can be read, as actions."""

    def __init__(self, answers: Answers, asked: Mapping[str, dict[str, Any]]) -> None:
        self.models = answers.readable()
        self.keys = sorted(asked)
        self.answers = answers
        first = answers.of(self.models[0])
        self.states = {key: state_of(key, asked[key], "", first[key]) for key in self.keys}
        self.action = cache(self._action)

    def _action(self, model: str, key: str) -> Action | None:
        answer = self.answers.of(model).get(key)
        if answer is None or answer.calls is None:
            return None
        if not answer.calls:
            return canonical_action({"role": "assistant", "content": "No tool fits this request."})
        return canonical_action(message_of(answer))

    def is_right(self, model: str, key: str) -> bool:
        """Return whether the makers of a question scored an answer as right."""
        return self.answers.of(model)[key].is_right

    def panel(self, rng: random.Random, without: Collection[str]) -> list[str]:
        """Draw models of other makers, one of each."""
        drawn: dict[str, str] = {}
        for model in rng.sample(self.models, len(self.models)):
            if maker(model) not in without:
                drawn.setdefault(maker(model), model)
        return list(drawn.values())[:N_PANEL]

    def answered(self, models: Sequence[str]) -> list[str]:
        """Return the questions that all these models answered readably."""
        return [key for key in self.keys if all(self.action(model, key) for model in models)]

    def prompt(self, key: str) -> tuple[Any, Any]:
        """Return tools and messages of a question."""
        return self.states[key]["tools"], self.states[key]["messages"]


def learned(world: World, without: Collection[str], seed: int = 1) -> dict[str, float]:
    """Return how much each feature tells, by a logistic regression with a ridge."""
    rng, held, right = random.Random(seed), [], []
    models = [model for model in world.models if maker(model) not in without]
    while len(held) < _N_LEARNED:
        model = rng.choice(models)
        panel = world.panel(rng, {maker(model), *without})
        keys = world.answered([model, *panel])
        for key in rng.sample(keys, min(60, len(keys))):
            others = [world.action(name, key) for name in panel]
            held.append(features(world.action(model, key), others, *world.prompt(key)))
            right.append(world.is_right(model, key))
    return regression(held, right, ridge_of_always=1.0)


def draw(world: World, rng: random.Random, size: int, known: dict[Any, Any]) -> dict[str, Any]:
    """Judge one drawn pair of models, and return the verdict beside the truth."""
    while True:
        candidate, agent = rng.sample(world.models, 2)
        panel = world.panel(rng, {maker(candidate), maker(agent)})
        keys = world.answered([candidate, agent, *panel])
        if len(keys) >= size and len(panel) == N_PANEL:
            break
    makers = frozenset({maker(candidate), maker(agent)})
    if makers not in known:
        known[makers] = learned(world, makers)

    found = verdict(
        judged(
            world.action(candidate, key),
            world.action(agent, key),
            [world.action(name, key) for name in panel],
            *world.prompt(key),
            coefficients=known[makers],
        )
        for key in rng.sample(keys, size)
    )
    true = fmean(world.is_right(candidate, key) - world.is_right(agent, key) for key in keys)
    return {"candidate": candidate, "agent": agent, "panel": panel, "true": true, "found": found}


def figures(draws: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how often the verdicts hold."""
    apart = [each for each in draws if abs(each["true"]) >= _APART]
    could = [each for each in draws if each["found"].answer == "could"]
    could_not = [each for each in draws if each["found"].answer == "could not"]
    return {
        "draws": len(draws),
        "interval holds the truth": share(
            each["found"].low <= each["true"] <= each["found"].high for each in draws
        ),
        "half width": share((each["found"].high - each["found"].low) / 2 for each in draws),
        "error": round(
            math.sqrt(fmean((each["found"].difference - each["true"]) ** 2 for each in draws)), 3
        ),
        "apart by .05": len(apart),
        "sign right": share((each["found"].difference > 0) == (each["true"] > 0) for each in apart),
        "could": len(could),
        "could, but lower by .05": share(each["true"] < -_APART for each in could),
        "could, but lower by the margin": share(each["true"] < -MARGIN for each in could),
        "truly could": sum(each["true"] >= -MARGIN for each in draws),
        "could not": len(could_not),
        "could not, but within the margin": share(each["true"] > -MARGIN for each in could_not),
    }


def on_one_harness(folder: Path) -> Iterator[str]:
    """Compare models that did the same tasks: how often they start alike, and a line for each two."""
    found = runs(folder)
    steps = {name: {task: run.first for task, run in of.items()} for name, of in found.items()}
    acted = {
        name: {task: run.acted for task, run in of.items() if run.acted}
        for name, of in found.items()
    }
    for what, states in (("step", steps), ("consequence", acted)):
        same = [
            agrees_at(
                "effect", agreement_level(action_of(states[a][task]), action_of(states[b][task]))
            )
            for a, b in combinations(sorted(states), 2)
            for task in states[a].keys() & states[b].keys()
        ]
        yield f"the same first {what}: {sum(same)} of {len(same)}"
    tasks = sorted(set.intersection(*map(set, acted.values())))
    solved = {name: sum(run.is_solved for run in of.values()) for name, of in found.items()}
    for candidate, agent in permutations(acted, 2):
        panel = [name for name in acted if name not in (candidate, agent)]
        told = verdict(
            judged(
                action_of(acted[candidate][task]),
                action_of(state := acted[agent][task]),
                [action_of(acted[name][task]) for name in panel],
                state.get("tools") or (),
                state["messages"],
            )
            for task in tasks
        )
        yield (
            f"{candidate} (solved {solved[candidate]}) for {agent} ({solved[agent]}): {told.answer}, "
            f"{told.difference:+.2f} ({told.low:+.2f} to {told.high:+.2f}) {told.unfit or ''}"
        )


def main() -> None:
    """Draw pairs of models, and print how often the verdicts hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("answers", type=Path, nargs="?")
    parser.add_argument("questions", type=Path, nargs="?")
    parser.add_argument("--sessions", type=Path)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--size", type=int, default=150)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--learn", action="store_true")
    given = parser.parse_args()
    if given.sessions:
        for line in on_one_harness(given.sessions):
            print(line, flush=True)
        return
    answers = Answers(given.answers)
    world = World(answers, questions(given.questions))
    if given.learn:
        lines = [
            "# How likely an answer is right, by what a panel tells: log-odds that add up.",
            "# Made by benchmarks/verdict.py --learn; read by verdict.py.",
            "[about]",
            "[right]",
        ]
        lines[2] = (
            f"# {answers.folder.name}, HuanzhiMao/BFCL-Result, {len(world.models)} models, {_N_LEARNED:,} answers"
        )
        lines += [f'"{name}" = {value:.2f}' for name, value in learned(world, ()).items()]
        path = Path(__file__).parents[1] / "replay_pipeline" / "judge" / "verdict.toml"
        path.write_text("\n".join(lines) + "\n")
    rng, known = random.Random(given.seed), {}
    draws = [draw(world, rng, given.size, known) for _ in range(given.draws)]
    for name, value in figures(draws).items():
        print(f"{name}: {value}")
    if given.json:
        given.json.write_text(json.dumps(figures(draws), indent=1) + "\n")


if __name__ == "__main__":
    main()
