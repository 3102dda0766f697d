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

    python benchmarks/verdict.py --planted SESSIONS [--draws 21]

Better, equal, and worse models are planted on a local server, at decisions of these sessions: the agent is right at .85 of
them, they at .95, .85, and .50, and each of the panel at .75. Printed are the verdicts, their bills, and their CPU seconds.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, cycle, permutations
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
from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.judge.verdict import MARGIN, features, judged, verdict
from replay_pipeline.replay import openrouter_name
from replay_pipeline.settings import Settings
from replay_pipeline.stages.budget.verdict import verdict_run
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.testing import TeacherServer
from replay_pipeline.types import Message

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


_PLANTED = {"better": 0.95, "equal": 0.85, "worse": 0.50}
_AGENT, _OF_PANEL = 0.85, 0.75
_WORLD = "mistralai", "deepseek", "qwen", "z-ai"
_AGENT_PRICE = 5.0, 25.0
"""What the agent costs when it is asked again, in dollars per million tokens read and written. The others cost 0.40 and
1.60, and 0.04 from their cache."""


def planted(sessions: Path, n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the verdicts on planted models at decisions of some sessions, asked over HTTP."""
    rng = random.Random(seed)
    kinds = [(f"w{number}", kind) for number, kind in zip(range(n), cycle(_PLANTED), strict=False)]

    def other() -> Message:
        command = json.dumps({"command": f"make step-{rng.randrange(10**9)}"})
        return {
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "Bash", "arguments": command}}
            ]
        }

    answers: dict[str, dict[str, Message]] = {}
    for state in ClaudeCodeIngester().ingest(sessions):
        own = {k: v for k, v in state["student_action"].items() if k != "reasoning"}
        at = answers[state["state_id"]] = {openrouter_name(state.get("student_model") or ""): own}
        for world, kind in kinds:
            right = own if rng.random() < _AGENT else other()
            for vendor, p in zip(_WORLD, (_PLANTED[kind], *[_OF_PANEL] * 3), strict=True):
                at[f"{vendor}/{world}"] = right if rng.random() < p else other()
    agents = {model for at in answers.values() for model in at if model.split("/")[0] not in _WORLD}
    prices = dict.fromkeys(agents, _AGENT_PRICE)
    with (
        tempfile.TemporaryDirectory() as folder,
        TeacherServer(answers, prices=prices) as server,
    ):
        reached = {"base_url": server.base_url, "dialect": "openrouter"}
        for world, kind in kinds:
            panel = [
                {"name": f"{m}-{world}", "model": f"{m}/{world}", "api_key_env": "", **reached}
                for m in _WORLD[1:]
            ]
            student = {"name": "student", "model": "student", "api_key_env": "", **reached}
            changes = {
                "ingest": {"sources": [str(sessions)]},
                "replay": {"teachers": panel, "student": student},
            }
            project = Pipeline(Settings.load(data_dir=Path(folder), changes=changes))
            if not project.batches():
                project.ingest_new()
            before = time.process_time()
            found = verdict_run(project, f"mistralai/{world}", max_total_usd=2.0).report
            seconds = time.process_time() - before
            yield (
                {"kind": kind, "cpu_s": round(seconds, 1)}
                | {
                    name: found[name]
                    for name in (
                        "answer",
                        "n",
                        "difference",
                        "low",
                        "high",
                        "usd_per_decision",
                        "spent_usd",
                    )
                }
                | {"ended": found["ended"], "n_again": (found["again"] or {}).get("n", 0)}
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
    parser.add_argument("--planted", type=Path)
    given = parser.parse_args()
    if given.planted:
        for each in planted(given.planted, given.draws, given.seed):
            print(json.dumps(each), flush=True)
        return
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
