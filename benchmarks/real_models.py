"""Are agreed actions right, and rejected ones wrong, where real models answered and somebody scored them?

    git clone https://github.com/HuanzhiMao/BFCL-Result ANSWERS
    git clone https://github.com/ShishirPatil/gorilla QUESTIONS
    python benchmarks/real_models.py ANSWERS QUESTIONS [--draws 5] [--agents 99] [--seed 1] [--json FILE] [--learn]

The checkouts hold the answers of seventy models to the same questions with tools, each scored (`scored_answers.py`).

Each model is the agent, and so often as --draws says two to five others of other makers are its teachers. The product's
own extraction judges their answers with two families; nothing of a score is given to it. What it claims of a pair is learned
again without the agent's maker and without the question, so that no agent is judged by what its own scores taught. Printed is what is claimed
beside what is true: of all that teachers agree on against the agent, by agent, by what the sides differ in; then of the
pairs that are kept by default, and of the lessons. `--learn` writes `replay_pipeline/judge/belief.toml` from all.

    git clone https://github.com/NJU-LINK/CodeTracer SESSIONS
    python benchmarks/real_models.py --sessions SESSIONS/data/traj/claude_code

There four models did the same tasks. Each is the agent, and the others are its teachers, at its first step and at its first
consequence. Nobody scored a step: printed is what is claimed, beside how many of the tasks each side solved.
"""

import argparse
import json
import random
import statistics
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.scored_answers import (
    PRICES,
    Answers,
    maker,
    message_of,
    questions,
    runs,
    share,
    state_of,
)
from replay_pipeline.actions import canonical_action
from replay_pipeline.actions.difference import IN_WORDS, ActionDifference, Fact
from replay_pipeline.actions.tools import ToolList
from replay_pipeline.judge.belief import (
    LEAST_LESSON,
    VOTES,
    bounded,
    features,
    right_if_agreed,
)
from replay_pipeline.judge.extract import extract_pairs
from replay_pipeline.types import MIN_P_BETTER, TeacherAction

TEACHERS = (
    "gpt-4o-mini-2024-07-18",
    "meta-llama_Meta-Llama-3-70B-Instruct",
    "command-r-plus",
    "nvidia_nemotron-4-340b-instruct",
    "open-mixtral-8x22b",
    "claude-3-opus-20240229",
    "yi-large-fc",
    "ibm-granite_granite-20b-functioncalling",
    "gemini-1.5-flash-preview-0514",
    "meetkai_functionary-medium-v3.1-FC",
    "firefunction-v2-FC",
    "gorilla-openfunctions-v2",
)
BINS = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.01)
SIZES = (3, 2, 3, 4, 5)
"""Numbers of teachers, one draw after the other."""
N_PARTS = 4
"""Into so many parts questions are cut: without one, what is claimed of it is learned."""
MOST_DISSENT = 2
ANSWERS = ("the only answer", "the agent's action, one for it and one not")
"""Answers that nobody confirmed, as `answer_right` of the table has them."""
_UNKNOWN_PRICE = (99.0, 99.0)
FEWEST = 40
"""Agents with fewer pairs tell little of their own."""
SPREAD = 0.3
"""How much agents differ in the log-odds that their rejected side is wrong, beyond what anything tells without a score."""
_L2 = 1.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """What teachers agree on against an agent, and what is true of it."""

    agent: str
    category: str
    question: str
    differs: ActionDifference
    held: Mapping[str, float]
    """What holds of it, as the product's coefficients are named."""
    is_chosen_right: bool
    is_agent_right: bool

    @property
    def is_right(self) -> bool:
        """Return whether it makes a right pair."""
        return self.is_chosen_right and not self.is_agent_right


@dataclass(frozen=True, slots=True)
class Draw:
    """What one agent and its teachers make."""

    agent: str
    teachers: list[str]
    candidates: list[Candidate]
    agreed: list[tuple[int, bool]]
    """Where agent and teachers agree: families that differ, and whether it is right."""
    alone: list[bool]
    """Whether actions are right that nobody else took, where nobody agrees."""
    answers: list[tuple[str, float, bool]]
    """Answers that nobody confirmed, while the cheapest teacher or two were asked: whose, what is claimed, and
    whether it is right."""
    usd: float


def judge(
    answers: Answers, asked: Mapping[str, dict[str, Any]], agent: str, teachers: Sequence[str]
) -> Draw:
    """Extract what one agent and its teachers make, and hold it to the scores."""
    own = answers.of(agent)
    keys = [key for key in sorted(own) if key in asked and own[key].calls is not None]
    states = [state_of(key, asked[key], agent, own[key]) for key in keys]
    rows, usd = [], 0.0
    for teacher in sorted(teachers, key=lambda each: PRICES.get(each, _UNKNOWN_PRICE)):
        for key in keys:
            if (answer := answers.of(teacher).get(key)) is None:
                continue
            read, written = PRICES.get(teacher, (0.0, 0.0))
            usd += (read * answer.n_read + written * answer.n_written) / 1e6
            rows.append(
                TeacherAction(
                    state_id=key,
                    teacher=teacher,
                    model=teacher,
                    family=maker(teacher),
                    cost_usd=(read * answer.n_read + written * answer.n_written) / 1e6,
                    action=message_of(answer) if answer.calls is not None else None,
                    error_code=None if answer.calls is not None else "malformed_arguments",
                )
            )
    report = extract_pairs(states, rows, 2, min_p_better=0.0)

    def is_right(state_id: str, names: Iterable[str]) -> bool:
        # The same action may be scored differently where it was written differently.
        told = [answers.of(name)[state_id].is_right for name in names]
        return statistics.mean(told) > 0.5

    found = []
    n_agreed = sum(row["kind"] != "answer" for row in report.positives)
    agreement = (n_agreed + 9) / (n_agreed + len(report.pairs) + 10)
    for pair in report.pairs:
        facts: list[Fact] = pair["difference"]
        n_calls = len(pair["chosen_action"].get("tool_calls") or [])
        differs = ActionDifference(frozenset(facts), n_calls)
        held = features(
            differs,
            agreement=agreement,
            n_for=pair["n_teachers_agreeing"],
            n_voting=pair["n_teachers_valid"],
            n_against=pair["n_against"],
        )
        key = pair["state_id"]
        found.append(
            Candidate(
                agent,
                key.rsplit("_", 1)[0],
                key,
                differs,
                held,
                is_right(key, pair["teachers_agreeing"]),
                own[key].is_right,
            )
        )
    agreed = [
        (row["n_valid"] - row["n_agreeing"], own[row["state_id"]].is_right)
        for row in report.outcomes
        if row["outcome"] == "agreement"
    ]
    alone = [
        answers.of(name)[row["state_id"]].is_right
        for row in report.outcomes
        if row["outcome"] == "no_consensus" and row["n_agreeing"] == 1
        for name in (agent, *teachers)
        if row["state_id"] in answers.of(name)
    ]
    by_price, unconfirmed = list(dict.fromkeys(row.teacher for row in rows)), []
    own_actions = {
        state["state_id"]: canonical_action(
            state["student_action"], tools=ToolList(state["tools"])
        ).render()
        for state in states
    }
    asked_next = set(keys)
    for n_asked in (1, 2):
        # A second teacher is asked where the first one differs.
        some = [
            row for row in rows if row.teacher in by_price[:n_asked] and row.state_id in asked_next
        ]
        of_these = extract_pairs(states, some, 2).positives
        asked_next = {row["state_id"] for row in of_these if row["kind"] == "answer"}
        for row in of_these:
            if row["kind"] == "answer":
                is_agents = row["action"] == own_actions[row["state_id"]]
                if is_agents and row["p_chosen_right"] == right_if_agreed(0):
                    continue  # all end the turn, in other words
                whose = ANSWERS[is_agents]
                told = is_right(row["state_id"], [agent] if is_agents else row["teachers_agreeing"])
                unconfirmed.append((whose, row["p_chosen_right"], told))
    return Draw(agent, list(teachers), found, agreed, alone, unconfirmed, usd)


Coefficients = dict[str, float]


def fitted(
    found: Sequence[Candidate],
    truth: Callable[[Candidate], bool],
    weights: np.ndarray | None = None,
) -> Coefficients:
    """Return the logistic regression of what is true of candidates on what holds of them."""
    held = [each.held for each in found]
    return regression(held, [truth(each) for each in found], weights)


def regression(
    held: Sequence[Mapping[str, float]],
    true: Sequence[bool],
    weights: np.ndarray | None = None,
    *,
    ridge_of_always: float = 0.01,
) -> Coefficients:
    """Return the logistic regression of `true` on what holds, by Newton's method with a ridge."""
    names = sorted({name for each in held for name in each})
    places = {name: place for place, name in enumerate(names)}
    x = np.zeros((len(held), len(names)))
    for row, each in enumerate(held):
        x[row, [places[name] for name in each]] = list(each.values())
    y = np.array(true, float)
    w = np.ones(len(held)) if weights is None else weights
    b, ridge = np.zeros(len(names)), np.full(len(names), _L2)
    ridge[places["always"]] = ridge_of_always
    for _ in range(40):
        p = 1 / (1 + np.exp(-x @ b))
        slope = x.T @ (w * (y - p)) - ridge * b
        step = np.linalg.solve((x * (w * p * (1 - p))[:, None]).T @ x + np.diag(ridge), slope)
        b += np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-6:
            break
    return dict(zip(names, map(float, b), strict=True))


def probability(coefficients: Coefficients, each: Candidate) -> float:
    """Return the probability that coefficients give, as the product bounds it."""
    logit = sum(coefficients.get(name, 0.0) * value for name, value in each.held.items())
    return bounded(float(1 / (1 + np.exp(-logit))))


def both(found: Sequence[Candidate], weights: np.ndarray | None = None) -> list[Coefficients]:
    """Return the coefficients of the three tables of `belief.toml`."""
    kept = np.array([each.is_chosen_right for each in found])
    votes = [
        replace(each, held={n: x for n, x in each.held.items() if n in VOTES}) for each in found
    ]
    return [
        fitted(found, lambda each: each.is_chosen_right, weights),
        fitted(
            [each for each in found if each.is_chosen_right],
            lambda each: not each.is_agent_right,
            None if weights is None else weights[kept],
        ),
        fitted(votes, lambda each: each.is_chosen_right, weights),
    ]


@dataclass(frozen=True, slots=True)
class Claim:
    """A candidate with what is claimed of it."""

    of: Candidate
    chosen: float
    wrong: float

    @property
    def better(self) -> float:
        """Return the claimed probability that the pair is right."""
        return self.chosen * self.wrong

    @property
    def is_kept(self) -> bool:
        """Return whether the product keeps the pair by default."""
        return self.better >= MIN_P_BETTER


def held_out(found: Sequence[Candidate]) -> list[Claim]:
    """Claim of each candidate what was learned without the agent's maker and without a quarter of the questions, its own among them."""
    claims: list[Claim] = []
    parts = [(maker(each.agent), zlib.crc32(each.question.encode()) % N_PARTS) for each in found]
    for who, part in sorted(set(parts)):
        others = [each for each, (m, n) in zip(found, parts, strict=True) if m != who and n != part]
        models = both(others)
        claims += [
            Claim(each, *(probability(model, each) for model in models[:2]))
            for each, own in zip(found, parts, strict=True)
            if own == (who, part)
        ]
    return claims


def errors(claims: Sequence[Claim]) -> dict[str, Any]:
    """Return claims beside truth: all, and how far they are apart by agent."""
    kinds: dict[str, tuple[Sequence[Claim], Callable[[Claim], float], Callable[[Claim], float]]] = {
        "chosen right": (claims, lambda c: c.chosen, lambda c: c.of.is_chosen_right),
        "rejected wrong": (
            [claim for claim in claims if claim.of.is_chosen_right],
            lambda c: c.wrong,
            lambda c: not c.of.is_agent_right,
        ),
        "pair right": (claims, lambda c: c.better, lambda c: c.of.is_right),
    }
    result = {}
    for name, (some, said, true) in kinds.items():
        by_agent: dict[str, list[Claim]] = defaultdict(list)
        for claim in some:
            by_agent[claim.of.agent].append(claim)
        off = {
            agent: statistics.fmean(said(c) - true(c) for c in own)
            for agent, own in by_agent.items()
            if len(own) >= FEWEST
        }
        worst = sorted(map(abs, off.values()), reverse=True) or [0.0]
        result[name] = {
            "claimed": share(map(said, some)),
            "true": share(map(true, some)),
            "n": len(some),
            "agents": len(off),
            "off on average": share(worst),
            "off in nine of ten": round(worst[len(worst) // 10], 3),
            "off at most": round(worst[0], 3),
        }
        if name == "rejected wrong":
            for spread in (0.0, SPREAD):
                by_chance = off_by_chance(some, off, spread=spread)
                result[name][f"by chance, if agents differ by {spread}"] = by_chance
    return result


def off_by_chance(
    claims: Sequence[Claim], agents: Collection[str], *, spread: float = 0.0, n: int = 200
) -> list[list[float]]:
    """Return how far right claims of `wrong` seem to be off: mean, nine of ten, most; and what 95 % stay below.

    An agent answers a question once, however many draws of teachers judge it.

    Args:
        claims: what is claimed.
        agents: the agents that count.
        spread: how much agents differ in log-odds.
        n: how often to draw.
    """
    chance, own = np.random.default_rng(0), []
    for agent in sorted(agents):
        some = [claim for claim in claims if claim.of.agent == agent]
        questions_of = [claim.of.question for claim in some]
        own.append(
            (
                np.array([claim.wrong for claim in some]),
                np.unique(questions_of, return_inverse=True)[1],
            )
        )
    found = []
    for _ in range(n):
        off = []
        for said, places in own:
            odds = said / (1 - said) * np.exp(spread * chance.standard_normal())
            true = chance.random(places.max() + 1)[places] < odds / (1 + odds)
            off.append(abs(float(np.mean(said - true))))
        off.sort(reverse=True)
        found.append((statistics.fmean(off), off[len(off) // 10], off[0]))
    each = np.array(found)
    return [each.mean(0).round(3).tolist(), np.quantile(each, 0.95, 0).round(3).tolist()]


def table_by(
    claims: Sequence[Claim], key: Callable[[Claim], Iterable[Any]]
) -> list[dict[str, Any]]:
    """Return what is claimed and true by a property, the most frequent first."""
    groups: dict[Any, list[Claim]] = defaultdict(list)
    for claim in claims:
        for name in key(claim):
            groups[name].append(claim)
    return [
        {
            "of": name,
            "n": len(some),
            "claimed": share(c.better for c in some),
            "true": share(c.of.is_right for c in some),
            "both right": share(c.of.is_chosen_right and c.of.is_agent_right for c in some),
        }
        for name, some in sorted(groups.items(), key=lambda each: -len(each[1]))
    ]


def bought(draws: Sequence[Draw], claims: Sequence[Claim]) -> dict[str, Any]:
    """Return pairs and lessons, how right they are, and right ones per dollar."""
    kept, left = ([c for c in claims if c.is_kept is is_so] for is_so in (True, False))
    agreed = [
        is_right
        for draw in draws
        for n_differing, is_right in draw.agreed
        if right_if_agreed(n_differing) >= LEAST_LESSON
    ]
    lessons = [*agreed, *(c.of.is_chosen_right for c in left if c.chosen >= LEAST_LESSON)]
    right, usd = sum(c.of.is_right for c in claims), sum(draw.usd for draw in draws)
    n_right = sum(c.of.is_right for c in kept)
    return {
        "pairs": len(kept),
        "right": share(c.of.is_right for c in kept),
        "of the right ones": round(n_right / max(1, right), 3),
        "lessons": len(lessons),
        "lessons right": share(lessons),
        "agreements": len(agreed),
        "agreements right": share(agreed),
        "usd": round(usd, 2),
        "right pairs a dollar": round(n_right / usd, 2) if usd else None,
        "right pairs a dollar without a minimum": round(right / usd, 2) if usd else None,
        "right lessons a dollar": round(sum(lessons) / usd, 1) if usd else None,
    }


def table_of_answers(draws: Sequence[Draw]) -> list[dict[str, Any]]:
    """Return what is claimed of answers that nobody confirmed, beside what is true: of all, and by agent."""
    rows = []
    for name in ANSWERS:
        by_agent: dict[str, list[bool]] = defaultdict(list)
        claimed = []
        for draw in draws:
            for whose, claim, is_right in draw.answers:
                if whose == name:
                    claimed.append(claim)
                    by_agent[draw.agent].append(is_right)
        shares = sorted(statistics.mean(s) for s in by_agent.values() if len(s) >= FEWEST)
        ends = [round(shares[0], 3), round(shares[-1], 3)] if shares else None
        told = [each for some in by_agent.values() for each in some]
        rows.append(
            {"whose": name, "n": len(told), "claimed": share(claimed), "right": share(told), "by agent": ends}
        )  # fmt: skip
    return rows


def drawn(
    answers: Answers,
    asked: Mapping[str, dict[str, Any]],
    n_agents: int,
    n_draws: int,
    seed: int,
    without: Collection[str] = (),
) -> list[Draw]:
    """Draw agents, and teachers of other makers for each so often, and judge their answers.

    Args:
        answers: of all models.
        asked: the questions.
        n_agents: how many models are the agent, at most.
        n_draws: how often each is.
        seed: of the draws.
        without: makers none of whose models takes part.
    """
    models = [model for model in answers.readable() if maker(model) not in without]
    teachers = [model for model in TEACHERS if model in models]
    rng, draws = random.Random(seed), []
    agents = rng.sample(models, min(n_agents, len(models)))
    print(f"{len(agents)} agents, {len(asked)} questions, {len(teachers)} teachers", flush=True)
    for agent in agents:
        for _ in range(n_draws):
            others: dict[str, str] = {}
            for name in rng.sample(teachers, len(teachers)):
                if maker(name) != maker(agent):
                    others.setdefault(maker(name), name)
            size = SIZES[len(draws) % len(SIZES)]
            draws.append(judge(answers, asked, agent, list(others.values())[:size]))
        print(f"{agent}: {len(draws[-1].candidates)}", file=sys.stderr, flush=True)
    return draws


def learned_from(draws: Sequence[Draw], snapshot: str, n_again: int = 60) -> str:
    """Return the coefficients of all candidates, with their intervals over agents drawn again so often."""
    found = [each for draw in draws for each in draw.candidates]
    agents = sorted({each.agent for each in found})
    places = np.array([agents.index(each.agent) for each in found])
    best, chance = both(found), np.random.default_rng(0)
    again = [
        both(
            found,
            np.bincount(chance.integers(len(agents), size=len(agents)), minlength=len(agents))[
                places
            ].astype(float),
        )
        for _ in range(n_again)
    ]
    agreed = [each for draw in draws for each in draw.agreed]
    by_dissent = [
        share(ok for n, ok in agreed if n == few or n > few == MOST_DISSENT)
        for few in range(MOST_DISSENT + 1)
    ]
    lines = [
        "# How likely the sides of a pair are right and wrong, by what holds of it: log-odds that add up, each",
        "# with its 95 % interval over agents. Made by benchmarks/real_models.py --learn; read by belief.py.",
        f'date = "{snapshot}"',
        'source = "Berkeley Function Calling Leaderboard, answers of HuanzhiMao/BFCL-Result"',
        f"n_pairs = {len(found)}",
        f"n_agents = {len(agents)}",
        f"agreed_right = {by_dissent}",
        f"alone_right = {share(ok for draw in draws for ok in draw.alone)}",
        f"answer_right = {[share(ok for d in draws for whose, _, ok in d.answers if whose == each) for each in ANSWERS]}",
        f"beside_wrong = {share(c.is_agent_right for c in found if not c.is_chosen_right)}",
    ]
    for place, table in enumerate(("chosen_right", "rejected_wrong", "chosen_right_by_votes")):
        lines.append(f"\n[{table}]")
        for name, value in best[place].items():
            low, high = np.quantile([each[place].get(name, 0.0) for each in again], (0.025, 0.975))
            lines.append(f'"{name}" = [{value:.2f}, {low:.2f}, {high:.2f}]')
    return "\n".join(lines) + "\n"


def on_one_harness(folder: Path) -> Iterator[str]:
    """Say of each of a few models what the others agree on against it, and who solved those tasks."""
    found = runs(folder)
    for agent, own in found.items():
        for what in ("first", "acted"):
            states = {t: state for t, run in own.items() if (state := getattr(run, what))}
            rows = [
                TeacherAction(
                    state_id=states[task]["state_id"],
                    teacher=name,
                    model=name,
                    family=name.rpartition("_")[2],
                    action=state["student_action"],
                )
                for name, of in found.items()
                for task, run in of.items()
                if name != agent and task in states and (state := getattr(run, what))
            ]
            report = extract_pairs(
                states.values(), rows, 2, min_p_better=0.0, include_natural=False
            )
            tasks = {state["state_id"]: task for task, state in states.items()}
            solved = [
                (
                    found[name][tasks[pair["state_id"]]].is_solved,
                    own[tasks[pair["state_id"]]].is_solved,
                )
                for pair in report.pairs
                for name in pair["teachers_agreeing"]
            ]
            claimed = {
                n: share(p[n] or 0 for p in report.pairs) for n in ("p_chosen_right", "p_better")
            }
            theirs, its = (
                (share(side) for side in zip(*solved, strict=True)) if solved else (None, None)
            )
            yield (
                f"{agent}, {what}: {len(states)} states, {report.outcome_counts}, claimed "
                f"{claimed}, solved by those for the chosen side {theirs}, by the agent {its}"
            )


def main() -> None:
    """Draw teachers for each agent, and print what is claimed beside what is true."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("answers", type=Path, nargs="?")
    parser.add_argument("questions", type=Path, nargs="?")
    parser.add_argument("--sessions", type=Path)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--agents", type=int, default=99)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--learn", action="store_true")
    given = parser.parse_args()
    if given.sessions:
        for line in on_one_harness(given.sessions):
            print(line, flush=True)
        return
    answers, asked = Answers(given.answers), questions(given.questions)
    draws = drawn(answers, asked, given.agents, given.draws, given.seed)
    if given.learn:
        path = Path(__file__).parents[1] / "replay_pipeline" / "judge" / "belief.toml"
        path.write_text(learned_from(draws, answers.folder.name))
    claims = held_out([each for draw in draws for each in draw.candidates])
    result = {
        "snapshot": answers.folder.name,
        "all that teachers agree on against the agent": errors(claims),
        "kept": errors([claim for claim in claims if claim.is_kept]),
        "bought": bought(draws, claims),
        "answers that nobody confirmed": table_of_answers(draws),
        "by claim": table_by(claims, lambda c: [max(low for low in BINS if c.better >= low)]),
        "by difference": table_by(claims, lambda c: [IN_WORDS[f] for f in c.of.differs.names()]),
        "by category": table_by(claims, lambda c: [c.of.category]),
        "by threshold": [
            {
                "at least": least,
                "n": len(some),
                "right": share(c.of.is_right for c in some),
                "of the right ones": round(
                    sum(c.of.is_right for c in some) / max(1, sum(c.of.is_right for c in claims)), 3
                ),
            }
            for least in (0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8)
            if (some := [claim for claim in claims if claim.better >= least])
        ],
    }
    for name, part in result.items():
        print(f"\n{name}")
        for row in (
            part.items() if isinstance(part, dict) else [part] if isinstance(part, str) else part
        ):
            print("  ", row)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
