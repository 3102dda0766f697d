"""Real actions rewritten: are those that mean something else told apart, and the others not?

    python benchmarks/rewrites.py [SESSIONS] [--seed 0] [--most 30000] [--show 20] [--json FILE]

Each recorded call of the sessions (by default the bundled sample) is rewritten so that it surely means something else
(another file, pattern, text, operator, folder, a redirection, a command less or negated), and so that it surely means
the same (blanks, comments, quotes, line breaks, another order of arguments, paths written out, defaults told, more
context around an edit, another label or time limit). A false merge is a changed call that counts as the same at
`effect`; a false split is one that means the same and does not. No rewritten call is counted twice; rounds are made
until MOST are found, or a round finds no new one. Exit code 1 where there is a false merge, or more than one false split
in a hundred.
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
from replay_pipeline.testing.sample import SESSIONS_DIR
from replay_pipeline.types import Message

Arguments = dict[str, Any]
Rewrite = Callable[[Arguments, str, random.Random], Arguments | None]

_FILE = {"Read": "file_path", "Edit": "file_path", "Write": "file_path", "MultiEdit": "file_path"}
_PLAIN = re.compile(r"(?<=\s)[A-Za-z0-9_.-]+/[A-Za-z0-9_./-]*[A-Za-z0-9_](?=\s|$)")
_LITERAL = re.compile(r"(?<=\s)(['\"])([A-Za-z][\w ]{2,40})\1(?=\s|$)")
_SWITCH = re.compile(r"(?<=\s)--[a-z][a-z-]+(?=\s+-|\s*$)")
"""A long option behind which no value can stand."""
_ODD = re.compile(r"<<|\$\(|`|\becho\b|\bprintf\b|\n|#|\bfor\b|\bwhile\b|\bif\b")
"""What is left alone: here-documents, substitutions, loops, and words that are only printed."""
_LOOK_BEHIND = re.compile(
    r"&&\s*(?:ls|cat|head|tail|wc|grep|rg|find|stat|file|du|df|pwd|which|type|git (?:status|diff|log|show|branch))\b"
    r"[^&;]*$"
)
"""A look at the end, which makes no difference behind a consequence."""
_ACTS = re.compile(
    r"(?:make|pytest|npm|npx|yarn|pnpm|cargo|go|git (?:add|commit|push)|rm|mkdir|mv|cp|pip)\b[^|;&]*$"
)
_CODE = re.compile(r"\.(?:py|ts|js|go|rs|java)$")


def _with(arguments: Arguments, **changes: Any) -> Arguments:
    return {**arguments, **changes}


def _command(arguments: Arguments) -> str | None:
    command = arguments.get("command")
    if not isinstance(command, str) or _ODD.search(command) or _LOOK_BEHIND.search(command):
        return None
    return command


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


def sent_to_a_file(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Write what comes out to a file."""
    command = _command(arguments)
    if command is None or re.search(r"[>&]\s*$|&>|(?<!\d)>(?!&)", command):
        return None
    return _with(arguments, command=f"{command.rstrip()} > zq.log")


def in_background(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Go on without waiting."""
    command = _command(arguments)
    if command is None or command.rstrip().endswith(("&", ";")):
        return None
    return _with(arguments, command=f"{command.rstrip()} &")


def in_another_folder(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Go to another folder first."""
    command = _command(arguments)
    if command is None or re.match(r"\s*cd\b|\s*pwd\b", command):
        return None
    return _with(arguments, command=f"cd zq && {command}")


def other_environment(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Give the first command another environment."""
    command = _command(arguments)
    if command is None or not re.match(r"[a-z./]", command):
        return None
    return _with(arguments, command=f"ZQ=1 {command}")


def with_more_rights(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Run the first command as somebody else."""
    command = _command(arguments)
    if command is None or not re.match(r"(?!cd\b|sudo\b|time\b)[a-z./]", command):
        return None
    return _with(arguments, command=f"sudo {command}")


def one_option_less(arguments: Arguments, _cwd: str, chance: random.Random) -> Arguments | None:
    """Leave a long option out that stands alone."""
    command = _command(arguments)
    found = list(_SWITCH.finditer(command or ""))
    if command is None or not found:
        return None
    one = chance.choice(found)
    if len(re.findall(rf"{re.escape(one[0])}(?=\s|$)", command)) > 1:
        return None
    return _with(arguments, command=f"{command[: one.start()]}{command[one.end() :]}")


def other_errors(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Throw the complaints away instead of reading them."""
    command = _command(arguments)
    if command is None or "2>&1" not in command:
        return None
    return _with(arguments, command=command.replace("2>&1", "2>/dev/null", 1))


def pipe_turned(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Let the last two commands of a pipe change places."""
    command = _command(arguments)
    parts = (command or "").split(" | ")
    if command is None or len(parts) < 2 or re.search(r"['\"&;()]", command):
        return None
    *first, one, other = parts
    if one.split() == other.split():
        return None
    return _with(arguments, command=" | ".join([*first, other, one]))


def all_places(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Replace every place instead of one, or one instead of every."""
    is_text = all(isinstance(arguments.get(key), str) for key in ("old_string", "new_string"))
    if not is_text or not arguments.get("old_string"):
        return None
    return _with(arguments, replace_all=not arguments.get("replace_all"))


def other_anchor(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Insert the same text at another place."""
    old, new = arguments.get("old_string"), arguments.get("new_string")
    if not (isinstance(old, str) and isinstance(new, str) and old and new.startswith(old)):
        return None
    added = new.removeprefix(old)
    return (
        _with(arguments, old_string="zq anchor", new_string=f"zq anchor{added}") if added else None
    )


def other_lines(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Read what stands behind the lines that were read."""
    offset, limit = arguments.get("offset"), arguments.get("limit")
    if not isinstance(limit, int) or not isinstance(offset or 1, int):
        return None
    return _with(arguments, offset=max(offset or 1, 1) + limit)


def other_case(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Mind the case of letters, or don't."""
    if not re.search("[A-Za-z]", str(arguments.get("pattern"))):
        return None
    return _with(arguments, **{"-i": not arguments.get("-i")})


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


def other_code(arguments: Arguments, cwd: str, chance: random.Random) -> Arguments | None:
    """Write another text, and not in a comment."""
    found = _longer("new_string")(arguments, cwd, chance)
    if found is None:
        return None
    [line] = [line for line in found["new_string"].splitlines() if "zq" in line][:1] or [""]
    return None if re.search(r"#|//|/\*|^\s*\*", line) else found


def more_blanks(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Part words by more blanks."""
    command = _command(arguments)
    if command is None or re.search(r"['\"\\]", command):
        return None
    return _with(arguments, command=f" {command.replace(' ', '  ')} ")


def broken_line(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Go on in the next line."""
    command = _command(arguments)
    if command is None or not re.search(r" (?:&&|\|) ", command) or re.search(r"['\"\\]", command):
        return None
    return _with(arguments, command=re.sub(r" (&&|\|) ", r" \\\n  \1 ", command, count=1))


def line_behind(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Go on in the next line behind the operator, and end with an empty one."""
    command = _command(arguments)
    if command is None or not re.search(r" (?:&&|\|) ", command) or re.search(r"['\"\\]", command):
        return None
    return _with(arguments, command=re.sub(r" (&&|\|) ", r" \1\n", command, count=1) + "\n")


def _null(name: str) -> Rewrite:
    def null(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
        """Name an argument without giving a value."""
        return None if name in arguments else _with(arguments, **{name: None})

    return null


def told_defaults(arguments: Arguments, cwd: str, _chance: random.Random) -> Arguments | None:
    """Tell what holds anyway: the folder, all matches of a search."""
    if "pattern" not in arguments or "path" in arguments:
        return None
    return _with(arguments, path=cwd)


def ended(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """End with a semicolon."""
    command = _command(arguments)
    if command is None or command.rstrip().endswith((";", "&")):
        return None
    return _with(arguments, command=f"{command.rstrip()};")


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


def look_behind(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Look at what was done."""
    command = _command(arguments)
    if command is None or not _ACTS.match(command):
        return None
    return _with(arguments, command=f"{command.rstrip()} && git status")


def silenced(arguments: Arguments, _cwd: str, _chance: random.Random) -> Arguments | None:
    """Tell a checker to be silent."""
    path, new = arguments.get("file_path"), arguments.get("new_string")
    if not isinstance(path, str) or not isinstance(new, str) or not _CODE.search(path):
        return None
    mark = "# noqa" if path.endswith("py") else "// @ts-ignore"
    return _with(arguments, new_string=f"{mark}\n{new}")


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
            *(sent_to_a_file, in_background, in_another_folder, other_environment),
            *(with_more_rights, one_option_less, other_errors, pipe_turned),
        )
    },
    "Edit": {
        "another_file": another_file,
        "other_code": other_code,
        "old text": _longer("old_string"),
        "all_places": all_places,
        "other_anchor": other_anchor,
        "silenced": silenced,
    },
    "Write": {"another_file": another_file, "content": _longer("content")},
    "Read": {"another_file": another_file, "other_lines": other_lines},
    "Grep": {
        "pattern": _longer("pattern"),
        "path": _longer("path"),
        "glob": _longer("glob"),
        "other_case": other_case,
    },
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
            *(other_label, other_order, broken_line, line_behind, ended, look_behind),
        )
    }
    | {"null": _null("timeout")},
    "Edit": {
        "written_out": written_out,
        "more_context": more_context,
        "other_order": other_order,
        "null": _null("replace_all"),
    },
    "Write": {"written_out": written_out, "other_order": other_order},
    "Read": {"written_out": written_out, "other_order": other_order, "null": _null("offset")},
    "Grep": {"other_order": other_order, "null": _null("glob"), "told_defaults": told_defaults},
    "Glob": {"other_order": other_order, "told_defaults": told_defaults},
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
    parser.add_argument("sessions", type=Path, nargs="?", default=SESSIONS_DIR)
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
        seen: set[tuple[str, ...]] = set()
        while n.total() < options.most:
            before = n.total()
            for name, arguments, cwd in calls:
                for rule, rewrite in rules.get(name, {}).items():
                    other = rewrite(arguments, cwd, chance)
                    if other is None or (other == arguments and rule != "other_order"):
                        continue
                    key = (rule, cwd, json.dumps(arguments), json.dumps(other))
                    if key in seen:
                        continue
                    seen.add(key)
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
