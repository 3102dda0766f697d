"""Read what real models answered to questions with tools, and how each answer was scored.

    git clone https://github.com/HuanzhiMao/BFCL-Result ANSWERS
    git clone https://github.com/ShishirPatil/gorilla QUESTIONS

ANSWERS holds the answers of seventy models to the same questions, each scored by the makers of the Berkeley
Function Calling Leaderboard; QUESTIONS the questions and tools. The newest snapshot of the answers is read.

    git clone https://github.com/NJU-LINK/CodeTracer SESSIONS

SESSIONS/data/traj/claude_code holds the sessions of four models at the same tasks in one harness, and whether tests
pass in the end.
"""

import ast
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay_pipeline.actions import Action, canonical_action
from replay_pipeline.actions.keys import purpose_of
from replay_pipeline.errors import IngestError
from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.ingesters.trials import is_resolved
from replay_pipeline.types import TraceState

CATEGORIES = {
    "simple": "BFCL_v4_simple_python",
    "multiple_function": "BFCL_v4_multiple",
    "parallel_function": "BFCL_v4_parallel",
    "parallel_multiple_function": "BFCL_v4_parallel_multiple",
    "java": "BFCL_v4_simple_java",
    "javascript": "BFCL_v4_simple_javascript",
    "rest": "unused_datasets/question/BFCL_v4_rest",
    "relevance": "BFCL_v4_irrelevance",
}
"""Names of the answers, and files of the questions. In `relevance` no tool fits, and words are right; what is right
in `rest` was found by sending the request."""
LANGUAGES = {"java": "Java", "javascript": "JavaScript"}
"""Categories whose arguments are written in another language: the leaderboard asks for texts, and scores anything else as
wrong."""
MAKERS = {"gpt": "openai", "meta-llama": "meta", "open-mi": "mistral", "command": "cohere"}
"""Where the first word of a name is not its maker's."""
DATA = Path("berkeley-function-call-leaderboard/bfcl_eval/data")
MOST_UNREADABLE = 0.1
"""A model whose answers can't be read more often is left out: its form is not known here."""
PRICES = {
    "gpt-4o-mini-2024-07-18": (0.15, 0.60),
    "meta-llama_Meta-Llama-3-70B-Instruct": (0.59, 0.79),
    "command-r-plus": (3.0, 15.0),
    "nvidia_nemotron-4-340b-instruct": (4.2, 4.2),
    "open-mixtral-8x22b": (2.0, 6.0),
    "claude-3-opus-20240229": (15.0, 75.0),
    "yi-large-fc": (3.0, 3.0),
    "gemini-1.5-flash-preview-0514": (0.35, 1.05),
    "firefunction-v2-FC": (0.9, 0.9),
}
"""List prices of that summer, dollars per million tokens read and written."""
Calls = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Answered:
    """What a model answered to a question. `calls` is empty for words, None for what can't be read."""

    calls: Calls | None
    text: str
    is_right: bool
    n_read: int = 0
    n_written: int = 0


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

    def readable(self) -> list[str]:
        """Return the models whose answers can nearly all be read."""
        return [
            model
            for model in self.models()
            if share(a.calls is None for a in self.of(model).values()) <= MOST_UNREADABLE
        ]

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
            counts = [_count(row.get(f"{way}_token_count")) for way in ("input", "output")]
            yield row["id"], Answered(calls, text, row["id"] not in failed, *counts)


def _count(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0


def questions(checkout: Path) -> dict[str, dict[str, Any]]:
    """Return the questions by the ids of the answers."""
    folder = checkout / DATA
    found = {}
    for category, name in CATEGORIES.items():
        for line in (folder / f"{name}.json").read_text("utf-8").splitlines():
            row = json.loads(line)
            if (language := LANGUAGES.get(category)) is not None:
                for tool in row["function"]:
                    tool["parameters"]["properties"] = {
                        key: _written_in(language, value)
                        for key, value in tool["parameters"]["properties"].items()
                    }
            found[f"{category}_{row['id'].rsplit('_', 1)[1]}"] = row
    return found


def _written_in(language: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return an argument as the models were shown it: a text with a value of that language.

    Lists and objects are right without quotes too.
    """
    form = f" A {language} value of type {about['type']}, in string representation."
    is_text = about["type"] not in ("array", "Array", "ArrayList", "dict", "HashMap", "any")
    kind = {"type": "string"} if is_text else {}
    return {**kind, "description": about.get("description", "") + form}


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


def message_of(answer: Answered) -> dict[str, Any]:
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
        student_action=message_of(answer),
        student_model=agent,
        outcome="ok",
    )


def share(values: Iterable[float]) -> float | None:
    """Return the mean, or None of nothing."""
    values = list(values)
    return round(statistics.fmean(values), 3) if values else None


@dataclass(frozen=True, slots=True)
class Run:
    """How one model began a task."""

    first: TraceState
    """Its first step."""
    acted: TraceState | None
    """Its first step that was more than a look or a note."""
    is_solved: bool


def runs(folder: Path) -> dict[str, dict[str, Run]]:
    """Return the runs of models at the same tasks, by model and task. A run without an answer is left out."""
    found: dict[str, dict[str, Run]] = {}
    for task in sorted(path for path in folder.glob("*/*") if path.is_dir()):
        try:
            states = list(ClaudeCodeIngester().ingest(task))
        except IngestError:
            continue
        if not states:
            continue
        acted = (state for state in states if purpose_of(action_of(state)) is None)
        is_solved = any(is_resolved(path) for path in task.rglob("agent.cast"))
        run = Run(states[0], next(acted, None), is_solved)
        found.setdefault(task.parent.name, {})[task.name] = run
    return found


def action_of(state: TraceState) -> Action:
    """Return what the agent did at a state."""
    return canonical_action(state["student_action"], cwd=state.get("cwd"))
