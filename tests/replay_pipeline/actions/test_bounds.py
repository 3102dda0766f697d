"""No text raises, and none takes long: what is too long, too deep or too many equals only itself."""

import json
import random
import time

import pytest

from replay_pipeline.actions import agreement_level, canonical_action, parse_rendered
from replay_pipeline.actions.shell import shell_plan
from replay_pipeline.actions.tools import ToolList

CWD = "/home/ada/shop"


def message(text, made):
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in made]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def acts(*made, tools=None):
    return canonical_action(message("", made), cwd=CWD, tools=tools)


def bash(command):
    return acts(("Bash", {"command": command}))


def deep_object(depth, x):
    value = {"x": x}
    for _ in range(depth):
        value = {"a": value}
    return value


ROW = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "array", "items": ROW}}}
ROWS = ToolList([{"type": "function", "function": {"name": "T", "parameters": PARAMETERS}}])


def edits(*changes):
    names = ("file_path", "old_string", "new_string")
    return acts(*(("Edit", dict(zip(names, ("a.py", *each), strict=True))) for each in changes))


def reads(n, step):
    return acts(
        *(("Read", {"file_path": "a.py", "offset": i * step, "limit": 50}) for i in range(n))
    )


HARD = {
    "open brackets": lambda x: bash("$(" * 6_000 + x),
    "open quotes": lambda x: bash('"$(' * 4_000 + x),
    "heredocs": lambda x: bash("cat " + "<<A " * 50 + x),
    "too many heredocs": lambda x: bash("cat " + "<<A " * 3_000 + x),
    "long pipe": lambda x: bash("cat a" + " | cat" * 280 + x),
    "longer pipe": lambda x: bash("cat a" + " | cat" * 2_000 + x),
    "long list": lambda x: bash("a && " * 280 + "a" + x),
    "subshells": lambda x: bash("(" * 6_000 + "a" + ")" * 6_000 + x),
    "many words": lambda x: bash("mytool " + "a/b/../c " * 1_100 + x),
    "many flags": lambda x: bash("ls " + "-l " * 1_100 + x),
    "flag clusters": lambda x: bash("ls -" + "la" * 6_000 + x),
    "many redirects": lambda x: bash("a " + "2>&1 " * 250 + x),
    "braces": lambda x: bash("echo " + "{a," * 4_000 + x),
    "long command": lambda x: bash("echo " + "a" * 240_000 + x),
    "if if if": lambda x: bash("if " * 4_000 + x),
    "case": lambda x: bash("case a in " + "a) b;; " * 300 + "esac " + x),
    "arithmetic": lambda x: bash("echo $((" + "(1+" * 4_000 + x),
    "slashes": lambda x: acts(("Read", {"file_path": "/.." * 80_000 + x})),
    "deep arguments": lambda x: acts(("mcp__x", '{"a":' * 90_000 + x)),
    "wide arguments": lambda x: acts(("mcp__x", {f"k{n}{x}": n for n in range(12_000)})),
    "nested arguments": lambda x: acts(("mcp__x", {"a": [{f"k{n}{x}": n} for n in range(8_000)]})),
    "repeating edit": lambda x: edits(("a" * 40_000 + x, "b"), ("a" * 9_000, "c" + x)),
    "commented edit": lambda x: edits(("a", f"# {x}\n" + "f(a)  # why\n" * 1_200)),
    "quoted edit": lambda x: edits(("a", f"f('{x}" + "\"'{" * 5_000)),
    "many edits": lambda x: edits(*((f"line {n}{x}\n" * 100, f"{n}") for n in range(24))),
    "many reads": lambda x: reads(400, len(x) + 1),
    "overlapping reads": lambda x: reads(32, len(x) + 1),
    "a thousand commands": lambda x: bash("ls && " * 1_000 + "ls" + x),
    "ten thousand commands": lambda x: bash("ls && " * 10_000 + "ls" + x),
    "three hundred commands": lambda x: bash("ls && " * 290 + "ls" + x),
    "quoted commands": lambda x: bash("'ls' && " * 150 + "ls" + x),
    "ands and ors": lambda x: bash("a && 'b' || " * 150 + "a" + x),
    "substitutions": lambda x: bash("echo " + "$(echo " * 18 + x + ")" * 18),
    "quoted substitutions": lambda x: bash("echo " + '"$(echo ' * 12 + x + ')"' * 12),
    "substitutions side by side": lambda x: bash("echo " + "$(ls *) " * 200 + x),
    "blanks": lambda x: bash("ls" + " " * 240_000 + x + "\n" + x),
    "number signs": lambda x: bash("ls" + " #" * 5_000 + "\n" + x),
    "carriage returns": lambda x: bash("ls\r\n" * 2_000 + x),
    "dashes": lambda x: bash("ls " + "-" * 10_000 + x),
    "unlisted flags": lambda x: bash("mytool " + "--a --b " * 600 + x),
    "flags that override": lambda x: bash("rm " + "-i -f " * 30 + x),
    "option values": lambda x: bash("grep " + "-e a " * 1_500 + x),
    "find": lambda x: bash("find " + "( -name a -o " * 600 + x),
    "commands of commands": lambda x: bash("timeout 5 nice " * 500 + x),
    "modules": lambda x: bash("python -m " * 900 + x),
    "groups": lambda x: bash("{ " * 500 + "ls" + x + "; }" * 500),
    "loops": lambda x: bash("for i in a; do " * 100 + "ls" + x + "; done" * 100),
    "functions": lambda x: bash("f() { " * 100 + "ls" + x + "; }" * 100),
    "conditions": lambda x: bash("[[ " + "( " * 200 + "a" + x + " )" * 200 + " ]]"),
    "deep object": lambda x: acts(("mcp__x", deep_object(50_000, x))),
    "flat list": lambda x: acts(("mcp__x", {"a": [x, *[1] * 99_000]})),
    "long number": lambda x: acts(("mcp__x", '{"a":' + "9" * 200_000 + ',"b":"' + x + '"}')),
    "many large calls": lambda x: acts(*[("mcp__x", json.dumps({"a": [x, *[1] * 60_000]}))] * 200),
    "rendered lines": lambda x: parse_rendered("A {}\n" * 40_000 + x),
    "rendered tags": lambda x: parse_rendered("<tool_call>" * 20_000 + x),
    "schema": lambda x: acts(("T", {"a": [{"b": n} for n in range(400)], "x": x}), tools=ROWS),
    "long text": lambda x: canonical_action("a \u0301" * 40_000 + x),
}


@pytest.mark.parametrize("name", HARD)
def test_no_comparison_takes_over_a_tenth_of_a_second(name):
    """In one of three runs, so that a busy machine does not decide; each on new input."""

    def timed(run):
        a, b = HARD[name]("x" * (run + 1)), HARD[name]("y" * (run + 5))
        started = time.process_time()
        agreement_level(a, b)
        return time.process_time() - started

    assert any(timed(run) < 0.1 for run in range(3))


def test_a_command_beyond_the_bounds_is_compared_by_its_text():
    for command in ("ls && " * 10_000 + "ls", "(" * 500 + "ls" + ")" * 500, "ls " + "a " * 9_000):
        one, other = bash(command), bash(command + " -l")
        assert agreement_level(one, bash(command)) == "exact"
        assert agreement_level(one, bash(f" {command}\n")) == "effect"
        assert agreement_level(one, other) == "tool"


PIECES = [
    *("ls ", "-l ", "--all ", "git log ", "cd x ", "cd .. ", "'", '"', "`", "$(", ")", "(", "{ ", "; } "),
    *(" && ", " || ", " | ", " |& ", " & ", ";", "\n", "<<E\n", "\nE\n", "<<< ", "> o ", "2>&1 ", "if ", "then "),
    *("fi ", "for i in ", "do ", "done ", "case a in ", "a) ", ";; ", "esac ", "[[ ", " ]]", "((", "))", "$((1+"),
    *("${x:-", "}", "$x ", "\\", "\\\n", "#", " # ", "!", "~", "*", "?", "[a-", "é", "\u200b", "\u202e", "�"),
    *("\x00", "\x01", "\x02", "\ufeff", "🂡", "\r", "\t", "=", "A=1 ", "find . -exec ", "{} ", "+ ", "timeout 5 "),
    *("env A=1 ", "xargs ", "sed -e s/a/b/ ", "/../", "//", "./"),
]  # fmt: skip
"""What commands are made of, and what is in none."""


def monster(draw):
    """Some pieces, each many times, and in turn."""
    parts = []
    for _ in range(draw.randint(1, 4)):
        some = draw.choices(PIECES, k=draw.randint(1, 4))
        parts.append("".join(some) * draw.choice([1, 2, 10, 60, 400, 3_000, 30_000]))
    return "".join(parts)[: draw.choice([200, 10_000, 240_000])]


@pytest.mark.slow
def test_no_monster_raises_or_takes_over_a_tenth_of_a_second():
    draw = random.Random(23)
    slow = []
    n_read = 0
    for _ in range(400):
        command = monster(draw)

        def judged(command=command):
            shell_plan.cache_clear()
            started = time.process_time()
            one, other = bash(command), bash(command + draw.choice([" a", "\n", ")", "'"]))
            level = agreement_level(one, other)
            assert level in ("exact", "effect", "target", "tool") or not one.is_valid
            assert isinstance(one.render(), str)
            assert hash(one) == hash(one)
            return time.process_time() - started

        n_read += shell_plan(command, CWD).target is not None
        if not any(judged() < 0.1 for _ in range(4)):
            slow.append(command[:100])
    assert not slow
    assert n_read > 50


@pytest.mark.slow
def test_no_message_raises_whatever_its_shape():
    draw = random.Random(24)

    def value(depth=0):
        kind = draw.randrange(12 if depth < 4 else 8)
        if kind < 8:
            odd = [
                None,
                True,
                0,
                -1.5,
                1e308,
                2**70,
                "",
                "a\ud800",
                "{}",
                '{"command": "ls"}',
                "x" * 99,
            ]
            return draw.choice(odd)
        if kind < 10:
            return [value(depth + 1) for _ in range(draw.randrange(4))]
        names = ["type", "text", "name", "input", "function", "arguments", "command", "file_path"]
        return {draw.choice(names): value(depth + 1) for _ in range(draw.randrange(4))}

    seen = set()
    for _ in range(2_000):
        call = {
            "function": {"name": draw.choice(["Bash", "Edit", "Read", "x"]), "arguments": value()}
        }
        made = draw.choice([[call], [call, value()], value()])
        one = {"role": "assistant", "content": value(), "tool_calls": made}
        found = canonical_action(one, cwd=CWD)
        agreement_level(found, one)
        found.render(), found.to_message(), hash(found)
        seen.add((found.invalid_reason or "valid").partition(":")[0])
    assert seen >= {"valid", "empty", "malformed_arguments", "schema_invalid", "unnamed_tool"}


def test_large_and_deep_arguments_are_refused_with_a_reason():
    for name, arguments, reason in (
        ("Write", {"file_path": "a", "content": "x" * 10**6}, "arguments_too_large: Write"),
        ("T", {f"k{n}": n for n in range(257)}, "arguments_too_large: T"),
        ("T", '{"a":' + "[" * 100 + "]" * 100 + "}", "malformed_arguments: T: nested too deep"),
    ):
        assert acts((name, arguments)).invalid_reason == reason
