"""Are agreed actions right, and rejected ones wrong, where real models answered and somebody scored them?

    git clone https://github.com/HuanzhiMao/BFCL-Result ANSWERS
    git clone https://github.com/ShishirPatil/gorilla QUESTIONS
    python benchmarks/real_models.py ANSWERS QUESTIONS [--draws 18] [--seed 1] [--json FILE]

ANSWERS holds the answers of seventy models to the same questions with tools, each scored by the makers of the
Berkeley Function Calling Leaderboard; QUESTIONS the questions and tools. The newest snapshot of the answers is read.

One model is the agent, three others of other makers are the teachers, each drawn by seed, and the product's own
extraction judges their answers with two of three families. Nothing of a score is given to it. Printed is what it
claims beside what is true, by draw and over all draws, a calibration of the claim on pairs, and the same by what
the two sides of a pair differ in. A figure over all draws counts each pair once.
"""

import argparse
import ast
import json
import random
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.difference import IN_WORDS, difference
from replay_pipeline.actions import canonical_action
from replay_pipeline.judge.extract import extract_pairs
from replay_pipeline.types import TeacherAction, TraceState

CATEGORIES = {
    "simple": "simple_python",
    "multiple_function": "multiple",
    "parallel_function": "parallel",
    "parallel_multiple_function": "parallel_multiple",
    "java": "simple_java",
    "javascript": "simple_javascript",
    "relevance": "irrelevance",
}
"""Names of the answers, and of the questions. In `relevance` no tool fits, and words are right."""
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
MAKERS = {"gpt": "openai", "meta-llama": "meta", "open-mi": "mistral", "command": "cohere"}
"""Where the first word of a name is not its maker's."""
MOST_UNREADABLE = 0.1
"""A model whose answers can't be read more often is left out: its form is not known here."""
BINS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.01)

Calls = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Answered:
    """What a model answered to a question. `calls` is empty for words, None for what can't be read."""

    calls: Calls | None
    text: str
    is_right: bool


def maker(model: str) -> str:
    """Return who made a model, as far as its name tells."""
    known = [name for start, name in MAKERS.items() if model.startswith(start)]
    return known[0] if known else re.split(r"[-_]", model)[0]


def written_calls(text: str) -> Calls | None:
    """Read calls in the form that prompted models were asked for: `[name(argument=value)]`."""
    body = re.sub(r"```\w*", "", text).strip()
    if (found := re.search(r"\[.*\]", body, re.DOTALL)) is not None:
        body = found[0]
    try:
        tree = ast.parse(body if body.startswith("[") else f"[{body}]", mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return None
    if not isinstance(tree, ast.List) or not tree.elts:
        return None
    calls: Calls = []
    for each in tree.elts:
        if not isinstance(each, ast.Call) or each.args:
            return None
        arguments = {word.arg: _value(word.value) for word in each.keywords if word.arg}
        calls.append((ast.unparse(each.func).replace(".", "_"), arguments))
    return calls


def _value(node: ast.expr) -> Any:
    try:
        return json.loads(json.dumps(ast.literal_eval(node)))
    except (ValueError, TypeError):
        return ast.unparse(node)


def calls_of(result: Any) -> Calls | None:
    """Read an answer in either form; None if it is neither."""
    if isinstance(result, str):
        return written_calls(result)
    calls: Calls = []
    for each in result if isinstance(result, list) else [None]:
        if not isinstance(each, dict):
            return None
        for name, given in each.items():
            try:
                arguments = json.loads(given) if isinstance(given, str) else given
            except ValueError:
                return None
            if not isinstance(arguments, dict):
                return None
            calls.append((name.replace(".", "_"), arguments))
    return calls


class Answers:
    """The answers of one snapshot, by model and question."""

    def __init__(self, folder: Path) -> None:
        self.folder = max(path.parent for path in folder.glob("20*/result"))
        self._read: dict[str, dict[str, Answered]] = {}

    def models(self) -> list[str]:
        """Return the models that answered all categories."""
        return sorted(
            path.name
            for path in (self.folder / "result").iterdir()
            if all(self._file(path.name, name).exists() for name in CATEGORIES)
        )

    def of(self, model: str) -> dict[str, Answered]:
        """Return a model's answers by the id of their question."""
        if model not in self._read:
            self._read[model] = dict(
                pair for name in CATEGORIES for pair in self._category(model, name)
            )
        return self._read[model]

    def _file(self, model: str, category: str) -> Path:
        return (
            self.folder / "result" / model / f"gorilla_openfunctions_v1_test_{category}_result.json"
        )

    def _category(self, model: str, category: str) -> Iterator[tuple[str, Answered]]:
        scored = self.folder / "score" / model / f"{category}_score.json"
        failed = set()
        for line in scored.read_text("utf-8").splitlines()[1:]:
            row = json.loads(line)
            prompt = row.get("prompt")
            has_id = isinstance(prompt, dict) and "id" in prompt
            failed.add(prompt["id"] if has_id else f"{category}_{int(row['id']) - 1}")
        for line in self._file(model, category).read_text("utf-8").splitlines():
            row = json.loads(line)
            result = row.get("result")
            calls = calls_of(result)
            if category == "relevance" and calls is None and isinstance(result, str):
                calls = []
            text = result if isinstance(result, str) else ""
            yield row["id"], Answered(calls, text, row["id"] not in failed)


def questions(checkout: Path) -> dict[str, dict[str, Any]]:
    """Return the questions by the ids of the answers."""
    folder = checkout / "berkeley-function-call-leaderboard" / "bfcl_eval" / "data"
    found = {}
    for category, name in CATEGORIES.items():
        for line in (folder / f"BFCL_v4_{name}.json").read_text("utf-8").splitlines():
            row = json.loads(line)
            found[f"{category}_{row['id'].rsplit('_', 1)[1]}"] = row
    return found


_TYPES = {"dict": "object", "float": "number", "tuple": "array", "HashMap": "object"}


def _schema(value: Any) -> Any:
    if isinstance(value, list):
        return [_schema(each) for each in value]
    if not isinstance(value, dict):
        return value
    value = {key: _schema(each) for key, each in value.items()}
    if isinstance(kind := value.get("type"), str):
        known = {"string", "integer", "boolean", "number", "array", "object", "null"}
        kind = _TYPES.get(kind, kind.lower())
        value["type"] = kind if kind in known else "string"
        if kind == "any":
            del value["type"]
    return value


def _message(answer: Answered) -> dict[str, Any]:
    if not answer.calls:
        return {"role": "assistant", "content": answer.text or "No tool fits this request."}
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for number, (name, arguments) in enumerate(answer.calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def state_of(key: str, question: Mapping[str, Any], agent: str, answer: Answered) -> TraceState:
    """Return a question as a state whose action is the agent's answer."""
    turns = question["question"]
    tools = [
        {
            "type": "function",
            "function": {
                **tool,
                "name": tool["name"].replace(".", "_"),
                "parameters": _schema(tool["parameters"]),
            },
        }
        for tool in question["function"]
    ]
    return TraceState(
        state_id=key,
        session_id=key,
        messages=[dict(message) for message in turns[0]],
        tools=tools,
        student_action=_message(answer),
        student_model=agent,
        outcome="ok",
    )


@dataclass(frozen=True, slots=True)
class Judged:
    """A pair or a positive, with what is claimed and what is true of it."""

    is_pair: bool
    chosen_claimed: float
    chosen_right: bool
    pair_claimed: float
    pair_right: bool
    differs: str = ""
    """What the two sides of a pair differ in, in words."""


def judge(
    answers: Answers, asked: Mapping[str, dict[str, Any]], agent: str, teachers: Sequence[str]
) -> list[Judged]:
    """Extract the pairs of one agent and its teachers, and hold each to the scores."""
    own = answers.of(agent)
    keys = [key for key in sorted(own) if key in asked and own[key].calls is not None]
    states = [state_of(key, asked[key], agent, own[key]) for key in keys]
    rows = [
        TeacherAction(
            state_id=key,
            teacher=teacher,
            model=teacher,
            family=maker(teacher),
            action=_message(answer) if answer.calls is not None else None,
            error_code=None if answer.calls is not None else "malformed_arguments",
        )
        for teacher in teachers
        for key in keys
        if (answer := answers.of(teacher).get(key)) is not None
    ]
    report = extract_pairs(states, rows, 2)
    by_key = dict(zip(keys, states, strict=True))

    def is_right(state_id: str, names: Iterable[str]) -> bool:
        # The same action may be scored differently where it was written differently.
        told = [answers.of(name)[state_id].is_right for name in names]
        return statistics.mean(told) > 0.5

    found = []
    for pair in report.pairs:
        if pair.get("teachers_agreeing"):
            chosen = is_right(pair["state_id"], pair["teachers_agreeing"])
            right = chosen and not own[pair["state_id"]].is_right
            state = by_key[pair["state_id"]]
            teacher = answers.of(pair["teachers_agreeing"][0])[pair["state_id"]]
            kind = difference(
                canonical_action(state["student_action"]),
                canonical_action(_message(teacher)),
                state["tools"],
            )
            differs = IN_WORDS[kind] if kind else "the same"
            found.append(
                Judged(True, pair["p_chosen_right"], chosen, pair["p_better"], right, differs)
            )
    found += [
        Judged(False, 1.0, own[positive["state_id"]].is_right, 0.0, False)
        for positive in report.positives
    ]
    return found


def share(values: Iterable[float]) -> float | None:
    """Return the mean, or None of nothing."""
    values = list(values)
    return round(statistics.mean(values), 3) if values else None


def figures(found: Sequence[Judged]) -> dict[str, Any]:
    """Return claims beside truth."""
    pairs = [each for each in found if each.is_pair]
    return {
        "pairs": len(pairs),
        "chosen right": [
            share(p.chosen_claimed for p in pairs),
            share(p.chosen_right for p in pairs),
        ],
        "pair right": [share(p.pair_claimed for p in pairs), share(p.pair_right for p in pairs)],
        "positives": len(found) - len(pairs),
        "positives right": share(each.chosen_right for each in found if not each.is_pair),
    }


def by_claim(pairs: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return claimed and true shares of right pairs by bins of the claim."""
    bins: dict[int, list[Judged]] = defaultdict(list)
    for pair in pairs:
        bins[max(i for i, low in enumerate(BINS) if pair.pair_claimed >= low)].append(pair)
    return [
        {
            "from": BINS[number],
            "n": len(some),
            "claimed": share(p.pair_claimed for p in some),
            "true": share(p.pair_right for p in some),
        }
        for number, some in sorted(bins.items())
    ]


def by_difference(pairs: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return what is true of pairs by what their sides differ in, the most frequent first."""
    kinds: dict[str, list[Judged]] = defaultdict(list)
    for pair in pairs:
        kinds[pair.differs].append(pair)
    return [
        {
            "sides": kind,
            "n": len(some),
            "claimed": share(p.pair_claimed for p in some),
            "true": share(p.pair_right for p in some),
            "both right": share(p.chosen_right and not p.pair_right for p in some),
        }
        for kind, some in sorted(kinds.items(), key=lambda each: -len(each[1]))
    ]


def main() -> None:
    """Draw agents and teachers, and print what is claimed beside what is true."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("answers", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--draws", type=int, default=18)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    answers, asked = Answers(given.answers), questions(given.questions)
    models = [
        model
        for model in answers.models()
        if share(a.calls is None for a in answers.of(model).values()) <= MOST_UNREADABLE
    ]
    teachers = [model for model in TEACHERS if model in models]
    print(f"{len(models)} models, {len(asked)} questions, {len(teachers)} of them teachers")
    rng, draws, everything = random.Random(given.seed), [], []
    for _ in range(given.draws):
        agent = rng.choice(models)
        others = [name for name in teachers if maker(name) != maker(agent)]
        chosen = rng.sample(others, 3)
        found = judge(answers, asked, agent, chosen)
        everything += found
        row = {"agent": agent, "teachers": chosen, **figures(found)}
        draws.append(row)
        print(f"{agent} by {', '.join(chosen)}")
        print("   " + ", ".join(f"{name} {value}" for name, value in figures(found).items()))
    whole = figures(everything)
    table = by_claim([each for each in everything if each.is_pair])
    print("\nall draws: " + ", ".join(f"{name} {value}" for name, value in whole.items()))
    for row in table:
        print(
            f"  claimed from {row['from']:.1f}: {row['n']} pairs, {row['claimed']} / {row['true']}"
        )
    kinds = by_difference([each for each in everything if each.is_pair])
    for row in kinds:
        told = f"{row['claimed']} / {row['true']}, both right {row['both right']}"
        print(f"  {row['sides']}: {row['n']} pairs, {told}")
    if given.json:
        result = {
            "snapshot": answers.folder.name,
            "all": whole,
            "by_claim": table,
            "by_difference": kinds,
            "draws": draws,
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
