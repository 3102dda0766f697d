"""Can chosen and rejected be told apart by their look alone? On the bundled sample, or on a dataset.

    python benchmarks/format_leak.py
    python benchmarks/format_leak.py --dataset data/dataset

A classifier that sees nothing but surface features of the two sides (lengths, shares of kinds of
characters, JSON-ness) is trained on all sessions but one and judges that one. Half right is a
coin. Two questions:

- Pairs: which side is chosen? What is done shows in the look of a text too (`pytest tests/a.py` is
  longer than `pytest`), so a second classifier that sees only the names of the tools tells how
  much of the figure is due to what the sides do.
- Equivalent actions: which side is the teacher's, when teacher and student do the same? Here only
  the format can tell.

Of a published dataset, whose sides are in native form, it is counted how many calls fit the schema and
the paths of their own prompt (of the client's, where its texts are beside the dataset), and a classifier
judges by form alone: the order of keys, the way in which paths begin, blanks and escapes of the JSON, ids,
and words beside calls, each beside what it is in calls of the same tool with the same arguments. So which
tool is called tells nothing.
"""

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pyarrow.parquet as pq

from replay_pipeline.actions import agreement_level, agrees_at, canonical_action
from replay_pipeline.actions.native import NativeForm
from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.judge.extract import extract_pairs
from replay_pipeline.publish.client_texts import texts_in
from replay_pipeline.testing.sample import ANSWERS_FILE, SESSIONS_DIR
from replay_pipeline.types import DPOPair, TeacherAction, TraceState

MARK, MARK_OF_FORM = 0.60, 0.52
TOOLS = ("Bash", "Read", "Edit", "Grep", "Write", "Task", "Agent", "TodoWrite")
Side = tuple[str, str]
"""Chosen and rejected (or teacher and student), as text."""


def features(text: str) -> list[float]:
    """What a reader sees of a text without reading it."""
    n = max(len(text), 1)

    def share(signs: str) -> float:
        return sum(text.count(sign) for sign in signs) / n

    return [
        math.log1p(len(text)),
        math.log1p(text.count("\n")),
        math.log1p(len(text.split())),
        share(" "),
        share("{}[]"),
        share('"'),
        share("\\"),
        share("/"),
        share(",;:"),
        share(".!?"),
        share("-_"),
        sum(c.isupper() for c in text) / n,
        sum(c.isdigit() for c in text) / n,
        float(text.lstrip().startswith("{")),
        float(text.rstrip().endswith("}")),
        float('": "' in text),
        float('":"' in text),
        float(not text.isascii()),
    ]


def tools(text: str) -> list[float]:
    """Which tools a canonical text calls, and nothing else about it."""
    called = [line.partition(" ")[0] for line in text.split("\n") if line.endswith("}")]
    return [*(float(called.count(name)) for name in TOOLS), float(not called)]


def held_out_accuracy(
    sides: Sequence[Side],
    groups: Sequence[str],
    seen: Callable[[str], list[float]] = features,
) -> float:
    """Share of pairs whose first side the classifier finds in sessions that it has not seen."""
    rows = np.array([np.subtract(seen(c), seen(r)) for c, r in sides])
    groups = np.array(groups)
    right = 0.0
    for group in sorted(set(groups)):
        train, test = rows[groups != group], rows[groups == group]
        scale = np.abs(train).max(axis=0) + 1e-9
        scores = (test / scale) @ logistic_regression(train / scale)
        right += np.sum(scores > 0) + 0.5 * np.sum(scores == 0)
    return right / len(rows)


def logistic_regression(x: np.ndarray, *, ridge: float = 0.1, n_steps: int = 2_000) -> np.ndarray:
    """Weights that make `x @ weights` positive for (chosen - rejected) differences."""
    weights = np.zeros(x.shape[1])
    for _ in range(n_steps):
        miss = 1 / (1 + np.exp(x @ weights))
        weights += 1.0 * (x.T @ miss / len(x) - ridge / len(x) * weights)
    return weights


def naive_sides(
    pairs: Sequence[DPOPair], states: Sequence[TraceState], rows: Sequence[TeacherAction]
) -> list[Side]:
    """The same pairs with each side as it was logged or sent by the provider."""
    students = {state["state_id"]: state["student_action"] for state in states}
    teachers = {(row.state_id, row.teacher): row.action for row in rows}
    return [
        (
            json.dumps(teachers[pair["state_id"], pair["teachers_agreeing"][0]]),
            json.dumps(students[pair["state_id"]]),
        )
        for pair in pairs
    ]


def read_answers() -> list[TeacherAction]:
    rows = []
    for line in ANSWERS_FILE.read_text("utf-8").splitlines():
        one = json.loads(line)
        family = one["model"].split("/")[0]
        rows.append(
            TeacherAction(
                state_id=one["state_id"],
                teacher=one["model"],
                family=family,
                action=one.get("message"),
                error_code=None if one.get("message") else "failed",
            )
        )
    return rows


def equivalent_sides(
    states: Sequence[TraceState], rows: Sequence[TeacherAction]
) -> tuple[list[Side], list[Side], list[Side], list[str]]:
    """Teacher and student where both do the same: canonical, native and naive texts, sessions."""
    canonical: list[Side] = []
    native: list[Side] = []
    naive: list[Side] = []
    sessions: list[str] = []
    known = {state["state_id"]: state for state in states}
    for row in rows:
        state = known[row.state_id]
        teacher, student = (
            canonical_action(message, cwd=state.get("cwd"))
            for message in (row.action, state["student_action"])
        )
        if agrees_at("effect", agreement_level(teacher, student)):
            canonical.append((teacher.render(), student.render()))
            form = NativeForm(state["messages"], state.get("tools"), state.get("cwd"))
            native.append((json.dumps(form.message(teacher)), json.dumps(form.message(student))))
            naive.append((json.dumps(row.action), json.dumps(state["student_action"])))
            sessions.append(state.get("session_id", ""))
    return canonical, native, naive, sessions


def call_form(call: dict[str, Any]) -> list[float]:
    """How one call of a published message is written, and nothing of what it does."""
    text = call["function"]["arguments"]
    given = json.loads(text)
    paths = [v for k, v in given.items() if k in _PATHS and isinstance(v, str)]
    return [
        float(list(given) == sorted(given)),
        float(any(path.startswith("/") for path in paths)),
        float(any(path.startswith(("./", "../", "~")) for path in paths)),
        float(any("//" in path or path.endswith("/") for path in paths)),
        float('": ' in text.replace('\\"', "")),
        float(bool(re.search(r"\\u[0-9a-f]{4}|\\/", text))),
        float(None in given.values()),
        float(str(call.get("id")).startswith("call_")),
    ]


def calls_in(side: str) -> list[tuple[tuple[str, ...], list[float]]]:
    """The calls of a side: the tool with the arguments it is given, and the form."""
    calls = json.loads(side).get("tool_calls") or ()
    return [
        (
            (call["function"]["name"], *sorted(json.loads(call["function"]["arguments"]))),
            call_form(call),
        )
        for call in calls
    ]


def form_alone(sides: Sequence[Side]) -> Callable[[str], list[float]]:
    """What the form of a side tells: how far its calls are from those of their kind on both sides.

    A tool has arguments and paths of its own, so that form as such tells which tool is called. Calls of
    one tool with the same arguments are alike in what they could look like.
    """
    of_kind: dict[tuple[str, ...], list[list[float]]] = {}
    for text in (text for side in sides for text in side):
        for kind, seen in calls_in(text):
            of_kind.setdefault(kind, []).append(seen)
    expected = {kind: np.mean(seen, axis=0) for kind, seen in of_kind.items()}

    def form(side: str) -> list[float]:
        found = [np.subtract(seen, expected[kind]) for kind, seen in calls_in(side)]
        has_words = bool(found) and bool(json.loads(side).get("content"))
        return [*(np.mean(found, axis=0) if found else np.zeros(8)), float(has_words)]

    return form


def alphabetical(side: str) -> str:
    """A side with its arguments in the order of the alphabet: what a leak would look like."""
    message = json.loads(side)
    for call in message.get("tool_calls") or ():
        given = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(given, sort_keys=True, separators=(",", ":"))
    return json.dumps(message)


_PATHS = ("file_path", "path", "notebook_path")


def faults(row: dict[str, Any]) -> Counter[str]:
    """What calls of a published row are not as their own prompt wants them."""
    found: Counter[str] = Counter()
    written = paths_written(row["prompt"])
    tools = {
        tool["function"]["name"]: tool["function"] for tool in json.loads(row["tools"] or "[]")
    }
    for side in ("chosen", "rejected"):
        for call in row[side][-1]["tool_calls"] or ():
            schema = tools.get(call["function"]["name"], {}).get("parameters")
            given = json.loads(call["function"]["arguments"])
            found["calls"] += 1
            if schema is None:
                found["no such tool"] += 1
                continue
            told = schema.get("properties", {})
            known = [key for key in given if key in told]
            found["schema"] += not jsonschema.Draft202012Validator(schema).is_valid(given)
            found["order"] += known != [key for key in told if key in given]
            found["path"] += any(
                "absolute" in str(told[key].get("description")).lower()
                and not str(given[key]).startswith("/")
                for key in known
            )
            found["habit"] += any(
                breaks_habit(given[key], written[call["function"]["name"], key], row["cwd"])
                for key in set(given) & set(_PATHS)
                if not _SAYS_ITSELF.search(str(told.get(key, {}).get("description")))
            )
    return found


_SAYS_ITSELF = re.compile(r"\b(?:absolute|relative)\b", re.IGNORECASE)


def paths_written(prompt: Sequence[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """How many more absolute than relative paths the calls of a prompt have, by tool and argument."""
    found: Counter[tuple[str, str]] = Counter()
    for call in (call for message in prompt for call in message.get("tool_calls") or ()):
        given = json.loads(call["function"]["arguments"] or "{}")
        for key in set(given) & set(_PATHS) if isinstance(given, dict) else ():
            found[call["function"]["name"], key] += 1 if str(given[key]).startswith("/") else -1
    return found


def breaks_habit(path: Any, n_more_absolute: int, cwd: str | None) -> bool:
    """Whether a path in the folder of its state is written as most of its prompt's are not."""
    is_absolute = str(path).startswith("/")
    if is_absolute and not str(path).startswith(f"{cwd}/"):
        return False
    return n_more_absolute * (1 if is_absolute else -1) < 0


def with_client_texts(
    row: Mapping[str, Any], texts: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a row with the prompt and tools of its client, if the texts exist."""
    text = texts.get(row.get("client_texts") or "")
    if text is None:
        return dict(row)
    n_replaced, head = text["n_replaced"], text["messages"]
    needs = [
        place + len(head) - n_replaced if place >= n_replaced else place
        for place in row.get("needs") or ()
    ]
    found = {"prompt": [*head, *row["prompt"][n_replaced:]], "tools": text["tools"]}
    return dict(row) | found | ({"needs": needs} if row.get("needs") else {})


def judge_dataset(folder: Path) -> None:
    """Print how well the sides of a published dataset are formed, and whether their form tells them."""
    files = sorted(folder.glob("data/pairs/*/*/*.parquet"))
    texts = texts_in(folder)
    rows = [
        with_client_texts(row, texts)
        for file in files
        for row in pq.read_table(file, partitioning=None).to_pylist()
    ]
    n_own = sum(bool(row["client_texts"]) for row in rows)
    found = sum((faults(row) for row in rows), Counter())
    sides = [(json.dumps(row["chosen"][-1]), json.dumps(row["rejected"][-1])) for row in rows]
    groups = [row["conversation"] or "" for row in rows]
    accuracy = held_out_accuracy(sides, groups, form_alone(sides))
    leaking = [(chosen, alphabetical(rejected)) for chosen, rejected in sides]
    print(
        f"{len(rows)} pairs ({n_own} below a client's own texts), {found.pop('calls')} calls; a coin gives 50 % +- {_error(rows)}"
    )
    print(f"  calls against schema, key order or paths of their prompt: {dict(+found) or 'none'}")
    print(f"  native rendering, by form alone: {accuracy:.1%}  (mark: at most {MARK_OF_FORM:.0%})")
    found_out = held_out_accuracy(leaking, groups, form_alone(leaking))
    print(f"  the same with the keys of one side in alphabetical order: {found_out:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dataset", type=Path, help="a published dataset folder")
    if (folder := parser.parse_args().dataset) is not None:
        judge_dataset(folder)
        return
    states = list(ClaudeCodeIngester().ingest(SESSIONS_DIR))
    rows = read_answers()
    pairs = extract_pairs(states, rows, include_natural=False).pairs
    groups = [pair.get("session_id", "") for pair in pairs]
    sides = [(pair["chosen"], pair["rejected"]) for pair in pairs]
    canonical = held_out_accuracy(sides, groups)
    naive = held_out_accuracy(naive_sides(pairs, states, rows), groups)
    print(
        f"{len(pairs)} pairs of {len(set(groups))} sessions; a coin gives 50 % +- {_error(pairs)}"
    )
    print(f"  naive rendering, by its look:     {naive:.0%}")
    print(f"  canonical rendering, by its look: {canonical:.0%}  (mark: at most {MARK:.0%})")
    print(f"  by the names of the tools alone:  {held_out_accuracy(sides, groups, tools):.0%}")
    same, native, logged, groups = equivalent_sides(states, rows)
    n_equal = sum(teacher == student for teacher, student in same)
    print(f"{len(same)} equivalent actions, {n_equal} of them one text; a coin +- {_error(same)}")
    print(f"  naive rendering, by its look:     {held_out_accuracy(logged, groups):.0%}")
    print(f"  canonical rendering, by its look: {held_out_accuracy(same, groups):.0%}")
    print(f"  native rendering, by its look:    {held_out_accuracy(native, groups):.0%}")


def _error(rows: Sequence[object]) -> str:
    """Standard error of a coin's score."""
    return f"{math.sqrt(0.25 / len(rows)):.0%}"


if __name__ == "__main__":
    main()
