"""Questions as sessions that `ingest` reads, and the benchmark's own check of an answer.

The check is `bfcl-eval`'s, from its wheel: it needs none of the thirty packages that the wheel asks for.
"""

import json
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from benchmarks.scored_answers import CATEGORIES, DATA, Answered, Calls, maker, state_of

WHEEL = (
    "bfcl-eval==2026.3.23",
    "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
)


SYSTEM = "Answer with calls of your tools. If none fits, say so."


def named(model: str) -> str:
    """Return a model's name with its maker, as a router has it."""
    return f"{maker(model)}/{model}"


def category_of(key: str) -> str:
    """Return the category of a question."""
    return key.rpartition("_")[0]


def rows_of(
    key: str, question: Mapping[str, Any], model: str, answer: Answered
) -> list[dict[str, Any]]:
    """Return a question and a model's answer as Claude Code logs a session, with the prompt's tools."""
    state = state_of(key, question, model, answer)
    tools = [{"name": tool["function"]["name"], "schema": _in_its_form(tool["function"])}
             for tool in state.get("tools") or ()]  # fmt: skip
    action: Any = state["student_action"]
    calls = [{"type": "tool_use", "id": f"toolu_{number}", "name": call["function"]["name"],
              "input": json.loads(call["function"]["arguments"])}
             for number, call in enumerate(action.get("tool_calls") or ())]  # fmt: skip
    content = calls or [{"type": "text", "text": action["content"]}]
    asked = [message["content"] for message in state["messages"] if message["role"] == "user"]
    system = [message["content"] for message in state["messages"] if message["role"] == "system"]
    snapshot = {"type": "prompt_snapshot", "systemPrompt": [SYSTEM, *system], "tools": tools}
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": "Done."} for call in calls
    ]
    rows: list[dict[str, Any]] = [
        {"type": "user", "message": {"role": "user", "content": "\n\n".join(asked)}},
        {"type": "attachment", "attachment": snapshot},
        {"type": "assistant", "message": {"id": f"msg_{key}", "role": "assistant",
         "model": named(model), "content": content}},
        *([{"type": "user", "message": {"role": "user", "content": results}}] if calls else []),
    ]  # fmt: skip
    common = {"sessionId": key, "version": "2.1.280", "cwd": f"/work/{key}",
              "timestamp": "2026-11-01T10:00:00.000Z"}  # fmt: skip
    for i, row in enumerate(rows):
        row |= common | {"uuid": f"{key}-{i}", "parentUuid": f"{key}-{i - 1}" if i else None}
    return rows


def _in_its_form(function: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "description")
    return {name: function[name] for name in names} | {"input_schema": function["parameters"]}


def write_sessions(
    folder: Path,
    asked: Mapping[str, Mapping[str, Any]],
    keys: Sequence[str],
    model: str,
    answers: Mapping[str, Answered],
) -> Path:
    """Write a model's answers to questions as sessions, a file each."""
    folder.mkdir(parents=True, exist_ok=True)
    for key in keys:
        lines = [json.dumps(row) for row in rows_of(key, asked[key], model, answers[key])]
        (folder / f"{key}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


def right_answers(checkout: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what is right by question: for each call and argument, the values that are."""
    found = {}
    for category, name in CATEGORIES.items():
        path = checkout / DATA / "possible_answer" / f"{name}.json"
        for line in path.read_text("utf-8").splitlines() if path.exists() else ():
            row = json.loads(line)
            found[f"{category}_{row['id'].rpartition('_')[2]}"] = row["ground_truth"]
    return found


def first_right(calls: Sequence[Mapping[str, Any]]) -> Calls:
    """Return the first of the right values everywhere; an argument that may be missing is missing."""
    return [
        (name.replace(".", "_"), _first_of_each(arguments))
        for call in calls
        for name, arguments in call.items()
    ]


def _first_of_each(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(some[0]) for name, some in values.items() if "" not in some}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return _first_of_each(value)
    return [_plain(each) for each in value] if isinstance(value, list) else value


class Check:
    """Says whether calls are right, as the benchmark does."""

    def __init__(
        self,
        wheel: Path,
        asked: Mapping[str, Mapping[str, Any]],
        right: Mapping[str, Sequence[Mapping[str, Any]]],
    ) -> None:
        """Load the checker from its wheel."""
        # It wants to know only how a model writes a dot, and would load every vendor's client for that.
        models = ModuleType("bfcl_eval.constants.model_config")
        underscores = SimpleNamespace(underscore_to_dot=True)
        models.MODEL_CONFIG_MAPPING = defaultdict(lambda: underscores)  # type: ignore[attr-defined]
        sys.modules[models.__name__] = models
        sys.path.insert(0, str(wheel))
        from bfcl_eval.constants.enums import Language
        from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

        self._check = ast_checker
        self._languages = {"java": Language.JAVA, "javascript": Language.JAVASCRIPT}
        self._usual = Language.PYTHON
        self.asked, self.right = asked, right

    def __call__(self, key: str, message: Mapping[str, Any]) -> bool:
        """Return whether a message answers a question rightly."""
        calls = message.get("tool_calls") or []
        if not calls or key not in self.right:
            return not calls and category_of(key) == "relevance"
        output = []
        for call in calls:
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            output.append({call["function"]["name"]: arguments})
        language = self._languages.get(category_of(key), self._usual)
        tools, right = self.asked[key]["function"], self.right[key]
        try:
            return self._check(tools, output, right, language, category_of(key), "any")["valid"]
        except (KeyError, TypeError, AttributeError):
            return False  # a value of a type that the checker has no comparison for


def coin(
    key: str, models: Mapping[str, Mapping[str, Answered]], draw: random.Random
) -> Answered | None:
    """Let a coin decide whether to draw an answer that was scored right, or one that was scored wrong."""
    said = [own[key] for own in models.values() if key in own and own[key].calls]
    is_right = draw.random() < 0.5
    fitting = [answer for answer in said if answer.is_right is is_right] or said
    return draw.choice(fitting) if fitting else None
