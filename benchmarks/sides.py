"""Can the sides of published pairs be done where they stand? In every config and window.

    python benchmarks/sides.py [SESSIONS] [--work FOLDER] [--json benchmarks/results/sides.json]

The sessions are ingested, answered by rule (`plausible.py`: what the agent did, sound steps, and tempting ones),
and taken through extraction, the recipe `agent`, publishing, and the windows of the trainer. What is
left is judged by a reading of its own, from the texts alone, so that the product does not grade itself:

- infeasible: a file that is read or changed is named nowhere before, or a line that an edit replaces
  is shown nowhere before
- applied: the very edit succeeded before, and no command that restores files or names this one came after
- repeated: the very look is among the last eight calls, and since then nobody spoke, changed its file, or ran what
  may change anything

Of recorded sides those count that were feasible in the full prompt. A pair is for ending where its chosen side is a
text and the other calls, and against it the other way round. Exit code 1 where a mark is missed.
"""

import argparse
import contextlib
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.plausible import answers
from replay_pipeline.ingesters import ingest, open_traces, write_traces
from replay_pipeline.judge.extract import extract_pairs
from replay_pipeline.judge.records import pairs_table, positives_table
from replay_pipeline.normalize import DJNormalizer
from replay_pipeline.publish import layout, publish
from replay_pipeline.testing.sample import SESSIONS_DIR

LENGTHS = (8_192, 16_384, 32_768)
WINDOWS = (1_024, 2_048, 4_096, 8_192, None)
N_IN_WINDOWS = 400
"""Rows that are rendered at each window: all that edit a file, and some of the others. The last is without a limit."""
MARK_RECORDED, MARK_LOOKS = 0.01, 0.01
N_RECENT = 8

_FILE_TOOLS = {"Read": "file_path", "Edit": "file_path", "NotebookEdit": "notebook_path"}
_RESTORES = re.compile(
    r"\bgit\b.*\b(?:checkout|restore|reset|stash|revert|switch|clean|apply)\b|\bpatch\b"
)
_FAILED = re.compile(
    r"\s*(?:<tool_use_error>|Error|Permission|The user doesn|Exit code [1-9]|\[Request inter)", re.I
)
_LOOKS = ("Read", "Grep", "Glob", "LS")

Row = Mapping[str, Any]
Call = tuple[str, dict[str, Any]]


def calls_of(messages: Iterable[Row]) -> list[Call]:
    """Give the calls of messages, arguments as objects."""
    return [
        (call["function"]["name"], arguments_of(call))
        for message in messages
        for call in message.get("tool_calls") or ()
    ]


def arguments_of(call: Row) -> dict[str, Any]:
    """Give the arguments of a call, which are JSON text in some forms."""
    given = call["function"]["arguments"]
    return json.loads(given) if isinstance(given, str) else given


def needed(calls: Iterable[Call]) -> list[str]:
    """Give what must have been said before: names of files, and lines that are replaced."""
    found: list[str] = []
    for name, given in calls:
        if name in _FILE_TOOLS:
            found.append(str(given.get(_FILE_TOOLS[name], "")).rpartition("/")[2])
        if name == "Edit":
            lines = str(given.get("old_string", "")).splitlines()
            found += [line.strip() for line in lines if line.strip()]
    return [one for one in found if one]


def lacks(calls: Iterable[Call], text: str) -> bool:
    """Whether something is needed that a text does not hold, as it is or escaped for JSON."""
    return any(
        one not in text and json.dumps(one, ensure_ascii=False)[1:-1] not in text
        for one in needed(calls)
    )


def text_of(value: Any) -> str:
    """Give every text of a value, arguments of calls opened."""
    return "\n".join(_leaves(value))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
        if value.startswith(("{", "[{")):
            with contextlib.suppress(ValueError):
                yield from _leaves(json.loads(value))
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _leaves(one)
    elif isinstance(value, list):
        for one in value:
            yield from _leaves(one)


@dataclass
class Seen:
    """The calls of a prompt with their answers, and where the user spoke."""

    prompt: list[Row]
    calls: list[tuple[Call, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Match answers with calls: results follow their message, in the order of its calls."""
        for place, message in enumerate(self.prompt):
            following = self.prompt[place + 1 :]
            for n, call in enumerate(message.get("tool_calls") or ()):
                result = following[n] if n < len(following) else {}
                answer = result.get("content") or "" if result.get("role") == "tool" else ""
                self.calls.append(((call["function"]["name"], arguments_of(call)), answer, place))

    def is_applied(self, call: Call) -> bool:
        """Whether this very edit was made, and nothing may have taken it back."""
        name, given = call
        if name not in ("Edit", "Write"):
            return False
        file = str(given.get("file_path")).rpartition("/")[2]
        keys = ("file_path", "old_string", "new_string", "content")
        same = {key: given.get(key) for key in keys}
        is_made = False
        for (other, its), answer, _ in self.calls:
            if other == name and not _FAILED.match(answer):
                is_made |= all(
                    _tail(its.get(key)) == _tail(value)
                    if key == "file_path"
                    else its.get(key) == value
                    for key, value in same.items()
                )
            if other == "Edit" and str(its.get("file_path")).endswith(file) and is_made:
                is_made &= its.get("new_string") != given.get("old_string")
            if other == "Bash":
                command = str(its.get("command"))
                names_it = file in command and not re.match(
                    r"\s*(?:git (?:add|commit|diff)|grep|cat|go)\b", command
                )
                is_made &= not (_RESTORES.search(command) or names_it)
            if other == "Read" and str(its.get("file_path")).endswith(file):
                old, new = (
                    str(given.get(key) or "\0").strip() for key in ("old_string", "new_string")
                )
                is_made &= not (
                    old.splitlines()[:1] and old.splitlines()[0] in answer and new not in answer
                )
            if other not in ("Bash", "Read", "Edit", "Write", "Grep", "Glob") and file in str(its):
                is_made = False
        if any(
            m["role"] == "user"
            and file in str(m.get("content"))
            and "modified" in str(m.get("content"))
            for m in self.prompt
        ):
            is_made = False
        return is_made

    def is_repeated(self, call: Call) -> bool:
        """Whether this very look was just made, and nothing that it shows can have changed."""
        name, given = call
        if name not in _LOOKS:
            return False
        spoke = max((i for i, m in enumerate(self.prompt) if m["role"] == "user"), default=-1)
        file = str(given.get("file_path", "")).rpartition("/")[2]
        for (other, its), answer, place in reversed(self.calls[-N_RECENT:]):
            if place < spoke:
                return False
            if other == name and _plain(its) == _plain(given) and not _FAILED.match(answer):
                return True
            if other in ("Bash", "Edit", "Write", "MultiEdit", "Task", "Agent"):
                if name != "Read" or file in str(its) or other in ("Task", "Agent"):
                    return False
                if other == "Bash" and re.search(r"fmt|lint|git|sed|generate", str(its)):
                    return False
        return False


def _tail(path: Any) -> str:
    return "/".join(str(path).split("/")[-3:])


def _plain(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


COLUMNS = (
    "rows", "chosen edits", "infeasible", "recorded edits", "recorded infeasible", "applied",
    "looks", "repeated", "for ending", "against ending",
)  # fmt: skip


def judged(whole: Row, text: str, tally: Counter[str], prompt: list[Row] | None) -> None:
    """Count what is true of a row: `whole` is it in full, `text` all that stands before a side."""
    chosen, rejected = calls_of(whole["chosen"]), calls_of(whole["rejected"])
    tally["rows"] += 1
    tally["chosen edits"] += any(name == "Edit" for name, _ in chosen)
    tally["recorded edits"] += any(name == "Edit" for name, _ in rejected)
    # A file that the agent itself goes for counts as known: logs leave out its system prompt.
    known = text + json.dumps([given.get("file_path") for _, given in rejected])
    tally["infeasible"] += lacks(chosen, known)
    if lacks(rejected, known):
        tally["recorded infeasible"] += not lacks(rejected, text_of(whole["prompt"]) + known)
    looks = bool(chosen) and all(name in _LOOKS for name, _ in chosen)
    tally["looks"] += looks
    if prompt is not None:
        seen = Seen(prompt)
        tally["applied"] += any(map(seen.is_applied, chosen))
        tally["repeated"] += looks and all(map(seen.is_repeated, chosen))
    tally["for ending"] += bool(rejected) and not chosen
    tally["against ending"] += bool(chosen) and not rejected


def published(sessions: Path, folder: Path) -> tuple[Path, Counter[str], Any]:
    """Take sessions through all stages; give the dataset, how teachers and agent end, and the report."""
    write_traces(ingest([sessions]), folder / "traces")
    traces = open_traces(folder / "traces")
    states = list(traces.materialize())
    rows = list(answers(states))
    ends: Counter[str] = Counter()
    agent = {s["state_id"]: bool(s["student_action"].get("tool_calls")) for s in states}
    for row in rows:
        is_call = bool((row.action or {}).get("tool_calls"))
        ends["answers that end where the agent goes on"] += agent[row.state_id] and not is_call
        ends["answers that go on where the agent ends"] += is_call and not agent[row.state_id]
    ends["answers"] = len(rows)
    report = extract_pairs(states, rows)
    normalizer = DJNormalizer("agent")
    found = normalizer.run(pairs_table(report.pairs), prompts=traces.materialize)
    publish(
        [("traces", found.kept)],
        positives=[("traces", positives_table(report.positives))],
        prompts=lambda _: traces.materialize,
        folder=folder / "dataset",
        lengths=LENGTHS,
    )
    return folder / "dataset", ends, (report, found)


def rows_of(dataset: Path, config: str) -> Iterator[dict[str, Any]]:
    """Read the rows of a config."""
    for path in sorted((dataset / "data" / config).rglob("*.parquet")):
        yield from pq.read_table(path).to_pylist()


def _both(row: Row) -> list[Call]:
    return [*calls_of(row["chosen"]), *calls_of(row["rejected"])]


def windows(dataset: Path, whole: Mapping[str, Row]) -> Iterator[tuple[str, Counter[str], int]]:
    """Render the pairs as the trainer does; give the counts by window, and how many were refused."""
    from trainer.data.budget import needs_of
    from trainer.data.dataset import load_preference_data
    from trainer.data.rendering import Renderer
    from trainer.data.tiny import corpus, train_tokenizer

    data = load_preference_data(dataset)
    every = [*data.pairs, *data.test_pairs]
    every.sort(key=lambda row: not any(name == "Edit" for name, _ in _both(row)))
    rows = every[:N_IN_WINDOWS]
    tokenizer = train_tokenizer(corpus(rows[:200]), vocab_size=8_192)
    sizes: dict[str, int] = {}
    for size in WINDOWS:
        limit = size or 1_000_000
        renderer = Renderer(tokenizer=tokenizer, max_prompt_tokens=limit, max_response_tokens=1_024)
        renderer._sizes = sizes  # they are those of texts, whatever the window
        tally: Counter[str] = Counter()
        n_refused = 0
        for row in rows:
            sides = [*row["chosen"], *row["rejected"]]
            needs = needs_of(sides)
            fitted, ids = renderer._fitted(row["prompt"], row.get("tools"), needs)
            if fitted.cut.refusal and needs["texts"]:
                n_refused += 1
                continue
            if fitted.cut.refusal:  # a tail of it, as nothing is needed
                ids, _ = renderer.prompt(row["prompt"], row.get("tools"), sides=sides)
            judged(whole[row["pair_id"]], tokenizer.decode(ids), tally, fitted.messages)
        yield f"window {size:,}" if size else "no window", tally, n_refused


def printed(name: str, tally: Counter[str], left_out: int) -> bool:
    """Print a line of the table; tell whether a mark is missed."""
    print(
        f"| {name} | " + " | ".join(f"{tally[c]:,}" for c in COLUMNS) + f" | {left_out:,} |",
        flush=True,
    )
    recorded = tally["recorded infeasible"] > MARK_RECORDED * tally["recorded edits"]
    looks = tally["repeated"] > MARK_LOOKS * max(tally["looks"], 1)
    return bool(tally["infeasible"] or tally["applied"] or recorded or looks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sessions", type=Path, nargs="?", default=SESSIONS_DIR)
    parser.add_argument("--work", type=Path, help="keep the tables here")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sides-") as name:
        folder = args.work or Path(name)
        dataset, ends, (report, found) = published(args.sessions, folder)
        whole = {row["pair_id"]: row for row in rows_of(dataset, "pairs")}
        print(
            f"{len(report.outcomes):,} states, {len(report.pairs):,} pairs, {len(found.kept):,} kept"
        )
        print("| | " + " | ".join(COLUMNS) + " | left out |")
        print("|---" * (len(COLUMNS) + 2) + "|")
        table: dict[str, Any] = {}
        missed = False
        configs = ["pairs", "pairs_distillable", *map(layout.config_of_length, LENGTHS)]
        for config in configs:
            tally: Counter[str] = Counter()
            rows = list(rows_of(dataset, config))
            for row in rows:
                judged(whole[row["pair_id"]], text_of(row["prompt"]), tally, row["prompt"])
            missed |= printed(config, tally, len(whole) - len(rows))
            table[config] = dict(tally) | {"left out": len(whole) - len(rows)}
        for name, tally, n_refused in windows(dataset, whole):
            missed |= printed(name, tally, n_refused)
            table[name] = dict(tally) | {"left out": n_refused}
        difference = (
            abs(
                ends["answers that end where the agent goes on"]
                - ends["answers that go on where the agent ends"]
            )
            / ends["answers"]
        )
        pairs = table["pairs"]
        of_pairs = abs(pairs["for ending"] - pairs["against ending"]) / max(pairs["rows"], 1)
        missed |= of_pairs >= difference
        print(
            f"ending: {dict(ends)}; shares differ by {difference:.3f}, those of pairs by {of_pairs:.3f}"
        )
        if args.json:
            args.json.write_text(
                json.dumps({"benchmark": "sides", "ending": ends, "rows": table}, indent=2) + "\n"
            )
    sys.exit("a mark is missed" if missed else 0)


if __name__ == "__main__":
    main()
