"""Real actions rewritten: are those that mean something else told apart, and the others not?

    python benchmarks/rewrites.py SESSIONS [--seed 0] [--most 30000] [--show 20] [--json FILE]

Each recorded call of the sessions is rewritten so that it surely means something else (another file, pattern,
text, operator, a command less or negated), and so that it surely means the same (blanks, comments, quotes,
another order of arguments, paths written out, more context around an edit, another label or time limit). A false
merge is a changed call that counts as the same at `effect`; a false split is one that means the same and does
not. Changed calls are drawn until there are MOST of them, so that those that leave nothing to chance come again. Exit
code 1 where there is a false merge, or more than one false split in a hundred.
"""

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from replay_pipeline.actions import agreement_level, agrees_at, canonical_action
from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.types import Message

Arguments = dict[str, Any]
Rewrite = Callable[[Arguments, str, random.Random], Arguments | None]

_FILE = {"Read": "file_path", "Edit": "file_path", "Write": "file_path", "MultiEdit": "file_path"}
_PLAIN = re.compile(r"(?<=\s)[A-Za-z0-9_.-]+/[A-Za-z0-9_./-]*[A-Za-z0-9_](?=\s|$)")
_LITERAL = re.compile(r"(?<=\s)(['\"])([A-Za-z][\w ]{2,40})\1(?=\s|$)")
_ODD = re.compile(r"<<|\$\(|`|\becho\b|\bprintf\b|\n|#|\bfor\b|\bwhile\b|\bif\b")
"""What is left alone: here-documents, substitutions, loops, and words that are only printed."""


def _with(arguments: Arguments, **changes: Any) -> Arguments:
    return {**arguments, **changes}


def _command(arguments: Arguments) -> str | None:
    command = arguments.get("command")
    return command if isinstance(command, str) and not _ODD.search(command) else None


def another_path(arguments: Arguments, _cwd: str, chance: random.Random) -> Arguments | None:
    """Act on another file."""
    command = _command(arguments)
    found = [m for m in _PLAIN.finditer(command or "") if "dev/null" not in m[0]]
    if command is None or not found:
        return None
    one = chance.choice(found)
    return _with(arguments, command=f"{command[: one.end()]}zq{command[one.end() :]}")


def another_literal(arguments: Arguments, _cwd: str, chance: random.Random) -> Arguments | None:
    """Quote another text, such as a pattern."""
    command = _command(arguments)
    found = list(_LITERAL.finditer(command or ""))
    if command is None or not found:
        return None
    one = chance.choice(found)
    return _with(arguments, command=f"{command[: one.end(2)]}zq{command[one.end(2) :]}")


def other_operator(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Go on only where the first command fails."""
    command = _command(arguments)
    if command is None or " && " not in command or command.startswith("cd "):
        return None
    return _with(arguments, command=command.replace(" && ", " || ", 1))


def one_less(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Leave the last command out."""
    command = _command(arguments)
    if command is None or " && " not in command or '"' in command or "'" in command:
        return None
    return _with(arguments, command=command.rpartition(" && ")[0])


def negated(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Turn the status round."""
    command = _command(arguments)
    return None if command is None or "&&" in command else _with(arguments, command=f"! {command}")


def one_word_more(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Give the last command one operand more."""
    command = _command(arguments)
    if command is None or re.search(r"[|>&;]", command) or command.rstrip() == "pwd":
        return None
    return _with(arguments, command=f"{command.rstrip()} zq")


def another_file(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Read or change another file."""
    path = arguments.get("file_path")
    return _with(arguments, file_path=f"{path}zq") if isinstance(path, str) else None


def _longer(key: str) -> Rewrite:
    def rewrite(arguments: Arguments, _cwd: str, chance: random.Random) -> Arguments | None:
        """Write, replace or look for another text."""
        text = arguments.get(key)
        if not isinstance(text, str) or not text.strip():
            return None
        at = chance.randrange(len(text.rstrip()))
        return _with(arguments, **{key: f"{text[:at]}zq{text[at:]}"})

    return rewrite


def more_blanks(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Part words by more blanks."""
    command = _command(arguments)
    if command is None or re.search(r"['\"\\]", command):
        return None
    return _with(arguments, command=f" {command.replace(' ', '  ')} ")


def with_comment(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Say what it is for."""
    command = _command(arguments)
    return None if command is None else _with(arguments, command=f"{command}  # look")


def quoted(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Quote a word that needs no quotes."""
    command = _command(arguments)
    one = _PLAIN.search(command or "")
    if command is None or one is None:
        return None
    return _with(arguments, command=f"{command[: one.start()]}'{one[0]}'{command[one.end() :]}")


def other_quotes(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Use the other kind of quotes around plain words."""
    command = _command(arguments)
    one = _LITERAL.search(command or "")
    if command is None or one is None or len(re.findall(r"['\"\\]", command)) > 2:
        return None  # it may stand inside other quotes
    mark = "'" if one[1] == '"' else '"'
    return _with(
        arguments, command=f"{command[: one.start()]}{mark}{one[2]}{mark}{command[one.end() :]}"
    )


def into_the_folder(arguments: Arguments, cwd: str, _chance: random.Random) -> Arguments | None:
    """Go where it is already."""
    command = _command(arguments)
    if command is None or "||" in command or not re.fullmatch(r"[\w/.-]+", cwd):
        return None
    return _with(arguments, command=f"cd {cwd} && {command}")


def other_label(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Call it something else, and let it take longer."""
    if not isinstance(arguments.get("command"), str):
        return None
    return _with(arguments, description="Something else", timeout=123_000)


def other_order(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Give the arguments in another order."""
    return dict(reversed(arguments.items())) if len(arguments) > 1 else None


def written_out(arguments: Arguments, cwd: str, _chance: random.Random) -> Arguments | None:
    """Name the same file from the working directory, or from the root."""
    path = arguments.get("file_path")
    if not isinstance(path, str) or not path.startswith(f"{cwd}/"):
        return None
    return _with(arguments, file_path=f"./{path.removeprefix(f'{cwd}/')}")


def more_context(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Quote a line more around the same change."""
    old, new = arguments.get("old_string"), arguments.get("new_string")
    if not (isinstance(old, str) and isinstance(new, str) and old) or arguments.get("replace_all"):
        return None
    return _with(arguments, old_string=f"a line before\n{old}", new_string=f"a line before\n{new}")


CHANGING: dict[str, dict[str, Rewrite]] = {
    "Bash": {
        each.__name__: each
        for each in (
            another_path,
            another_literal,
            other_operator,
            one_less,
            negated,
            one_word_more,
        )
    },
    "Edit": {"another_file": another_file, "new text": _longer("new_string")},
    "Write": {"another_file": another_file, "content": _longer("content")},
    "Read": {"another_file": another_file},
    "Grep": {"pattern": _longer("pattern"), "path": _longer("path")},
    "Glob": {"pattern": _longer("pattern"), "path": _longer("path")},
    "WebSearch": {"query": _longer("query")},
    "WebFetch": {"url": _longer("url")},
    "Task": {"prompt": _longer("prompt")},
}
KEEPING: dict[str, dict[str, Rewrite]] = {
    "Bash": {
        each.__name__: each
        for each in (
            *(more_blanks, with_comment, quoted, other_quotes, into_the_folder),
            *(other_label, other_order),
        )
    },
    "Edit": {
        "written_out": written_out,
        "more_context": more_context,
        "other_order": other_order,
    },
    "Write": {"written_out": written_out, "other_order": other_order},
    "Read": {"written_out": written_out, "other_order": other_order},
    "Grep": {"other_order": other_order},
}


def calls_of(folder: Path) -> Iterator[tuple[str, Arguments, str]]:
    """Give every recorded call once: its tool, arguments and working directory."""
    seen: set[str] = set()
    for path in sorted(folder.rglob("*.jsonl")):
        for state in ClaudeCodeIngester(redact=False).ingest(path):
            action = state["student_action"]
            for call in () if isinstance(action, str) else action.get("tool_calls") or ():
                function = call["function"]
                key = f"{function['name']}\0{function['arguments']}\0{state.get('cwd')}"
                if key in seen:
                    continue
                seen.add(key)
                arguments = json.loads(function["arguments"])
                if isinstance(arguments, dict):
                    yield function["name"], arguments, state.get("cwd") or "/"


def _message(name: str, arguments: Arguments) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}


def judged(name: str, one: Arguments, other: Arguments, cwd: str) -> bool:
    """Whether two calls count as the same."""
    actions = [canonical_action(_message(name, each), cwd=cwd) for each in (one, other)]
    return agrees_at("effect", agreement_level(*actions))


def main() -> int:
    """Print a table of both kinds of mistakes, with some of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sessions", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=30_000)
    parser.add_argument("--show", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    calls = list(calls_of(options.sessions))
    chance.shuffle(calls)
    found: dict[str, dict[str, dict[str, int]]] = {}
    shown: list[str] = []
    for title, rules, is_wrong in (
        ("false merges", CHANGING, True), ("false splits", KEEPING, False),
    ):  # fmt: skip
        n: Counter[str] = Counter()
        wrong: Counter[str] = Counter()
        while n.total() < options.most:
            before = n.total()
            for name, arguments, cwd in calls:
                for rule, rewrite in rules.get(name, {}).items():
                    other = rewrite(arguments, cwd, chance)
                    if other is None or (other == arguments and rule != "other_order"):
                        continue
                    n[f"{name} {rule}"] += 1
                    if judged(name, arguments, other, cwd) is is_wrong:
                        wrong[f"{name} {rule}"] += 1
                        shown.append(f"{title}: {rule}\n  {arguments}\n  {other}"[:900])
            if not is_wrong or n.total() == before:
                break  # those that mean the same are not drawn by chance: once is all of them
        found[title] = {rule: {"n": n[rule], "wrong": wrong[rule]} for rule in sorted(n)}
        print(f"{title}: {wrong.total():,} of {n.total():,} ({len(calls):,} calls)")
        for rule, counts in found[title].items():
            print(f"  {rule:28s} {counts['wrong']:6,} of {counts['n']:7,}")
    for example in shown[: options.show]:
        print(example)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    merges, splits = (
        [sum(each[key] for each in found[title].values()) for key in ("wrong", "n")]
        for title in ("false merges", "false splits")
    )
    return 1 if merges[0] or splits[0] > 0.01 * splits[1] else 0


if __name__ == "__main__":
    sys.exit(main())
