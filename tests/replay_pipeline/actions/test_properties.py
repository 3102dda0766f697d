"""What holds for every input: symmetry, order, invariance, time."""

import json
import random
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay_pipeline.actions import LEVELS, agreement_level, agrees_at, canonical_action
from replay_pipeline.actions.agreement import strictness
from replay_pipeline.actions.keys import depend
from replay_pipeline.actions.shell import parsed_plan, shell_plan

pytestmark = pytest.mark.slow

CWD = "/home/ada/shop"
steady = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=100,
    suppress_health_check=list(HealthCheck),
)
"""The same examples on every run: a test that fails by chance helps nobody."""

paths = st.sampled_from(["a.py", "./a.py", f"{CWD}/a.py", "src/../a.py", "b.py", "B.py", "/b.py"])
lines = st.sampled_from(["x = 1", "x = 2", "y = 1", "x = 1\ny = 1", "x = 2\ny = 1", ""])
words = st.sampled_from(
    ["-l", "-a", "-la", "-n5", "-n", "5", "src", "./src", '"$x"', "$x", "'a b'", "*.py", "'*.py'"]
    + ["~/a", "--x=1", "--no-x", "--", ">", "o.txt", "2>&1", "&&", "||", ";", "|", "\n", "&", "#c"]
    + ["(", ")", "{", "}", "$(ls)", "`ls`", "<<E", "E", "cd", "A=1", "if", "then", "fi", "\\"]
)
programs = st.sampled_from(["ls", "grep", "git log", "git diff", "head", "pytest", "mytool", "cd"])
commands = st.one_of(
    st.builds(
        lambda program, rest: " ".join([program, *rest]), programs, st.lists(words, max_size=5)
    ),
    st.lists(words, max_size=8).map(" ".join),
    st.text(max_size=30),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def call(name, **arguments):
    return name, {key: value for key, value in arguments.items() if value is not None}


edits = st.builds(
    lambda path, old, new: call("Edit", file_path=path, old_string=old, new_string=new),
    paths,
    lines,
    lines,
)
multi_edits = st.builds(
    lambda path, inner: call("MultiEdit", file_path=path, edits=[one for _, one in inner]),
    paths,
    st.lists(edits, min_size=1, max_size=3),
)
numbers = st.none() | st.integers(0, 60)
reads = st.builds(
    lambda path, offset, limit: call("Read", file_path=path, offset=offset, limit=limit),
    paths,
    numbers,
    numbers,
)
greps = st.builds(
    lambda path, pattern, flag: call("Grep", path=path, pattern=pattern, **{"-i": flag}),
    st.none() | paths,
    st.sampled_from(["x", "y"]),
    st.none() | st.booleans(),
)
shells = st.builds(lambda command: call("Bash", command=command), commands)
foreign = st.builds(
    lambda name, arguments: (name, arguments),
    st.sampled_from(["mcp__a__b", "LS", "TaskUpdate", "WebFetch", "Read", "Bash", "Edit"]),
    st.dictionaries(st.sampled_from(["path", "url", "command", "taskId", "edits"]), values),
)
calls = st.one_of(edits, multi_edits, reads, greps, shells, foreign)
texts = st.sampled_from(["Done.", " Done. ", "done", "", "Read {}"]) | st.text(max_size=9)


def message(text, made, dump=json.dumps):
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {"id": f"id{n}", "function": {"name": name, "arguments": dump(arguments)}}
            for n, (name, arguments) in enumerate(made)
        ],
    }


messages = st.one_of(
    st.builds(message, texts, st.lists(calls, min_size=1, max_size=1)),
    st.builds(message, texts, st.lists(st.one_of(reads, edits, multi_edits), max_size=4)),
    st.builds(message, texts, st.lists(calls, max_size=4)),
)
actions = messages.map(lambda one: canonical_action(one, cwd=CWD))


@steady
@given(actions, actions)
def test_agreement_is_symmetric(a, b):
    assert agreement_level(a, b) == agreement_level(b, a)


@steady
@given(actions)
def test_a_valid_action_is_exactly_itself_and_an_invalid_one_nothing(a):
    assert agreement_level(a, a) == ("exact" if a.is_valid else None)


@steady
@given(actions, actions, actions)
def test_exact_is_transitive(a, b, c):
    if agreement_level(a, b) == "exact" == agreement_level(b, c):
        assert agreement_level(a, c) == "exact"


@steady
@given(actions, actions)
def test_each_level_implies_the_looser_ones(a, b):
    found = agreement_level(a, b)
    held = [agrees_at(level, found) for level in LEVELS]
    assert held == sorted(held)
    assert held.count(True) == strictness(found)


def shuffled(value, seed):
    """The same JSON value with its keys in another order."""
    if isinstance(value, dict):
        items = [(key, shuffled(inner, seed)) for key, inner in value.items()]
        random.Random(seed).shuffle(items)
        return dict(items)
    return [shuffled(inner, seed) for inner in value] if isinstance(value, list) else value


@steady
@given(st.lists(calls, min_size=1, max_size=3), st.integers(0, 9), st.sampled_from([None, 2]))
def test_key_order_and_json_spelling_mean_nothing(made, seed, indent):
    one = canonical_action(message("", made), cwd=CWD)
    respelled = [(name, shuffled(arguments, seed)) for name, arguments in made]
    other = canonical_action(
        message("", respelled, lambda a: json.dumps(a, indent=indent, ensure_ascii=indent is None)),
        cwd=CWD,
    )
    assert one.invalid_reason == other.invalid_reason
    assert one == other or not one.is_valid


@steady
@given(actions)
def test_canonical_form_is_a_fixed_point(a):
    if a.is_valid:
        again = canonical_action(a.to_message(), cwd=CWD)
        assert agreement_level(a, again) in ("exact", "effect")
        assert again.render() == a.render()


@steady
@given(st.permutations(range(4)), st.lists(st.one_of(reads, greps), min_size=4, max_size=4))
def test_calls_that_only_look_are_a_set(order, made):
    one = canonical_action(message("", made), cwd=CWD)
    other = canonical_action(message("", [made[n] for n in order]), cwd=CWD)
    assert agreement_level(one, other) == "exact"


@steady
@given(st.permutations(range(3)), st.lists(calls, min_size=3, max_size=3, unique_by=str))
def test_calls_that_depend_on_each_other_keep_their_order(order, made):
    """Whatever order of the same calls is called the same can be reached by swapping neighbours."""
    one = canonical_action(message("", made), cwd=CWD)
    other = canonical_action(message("", [made[n] for n in order]), cwd=CWD)
    if one.is_valid and agreement_level(one, other) == "exact":
        assert all(
            not depend(one.calls[i], one.calls[j])
            or order.index(i) < order.index(j)
            or one.calls[i] == one.calls[j]
            for i in range(3)
            for j in range(i + 1, 3)
        )


@steady
@given(st.lists(reads, min_size=2, max_size=5), st.lists(reads, min_size=2, max_size=5))
def test_assignment_of_parallel_calls_is_the_best_one(ours, theirs):
    from itertools import permutations

    one, other = (canonical_action(message("", made), cwd=CWD) for made in (ours, theirs))
    best = 0
    if len(ours) == len(theirs):
        singles = [
            [
                strictness(
                    agreement_level(
                        canonical_action(message("", [a]), cwd=CWD),
                        canonical_action(message("", [b]), cwd=CWD),
                    )
                )
                for b in theirs
            ]
            for a in ours
        ]
        n = range(len(ours))
        best = max(min(singles[i][order[i]] for i in n) for order in permutations(n))
    assert strictness(agreement_level(one, other)) == best


simple = st.lists(
    st.text(string.ascii_letters + string.digits + "-_./", min_size=1, max_size=6), max_size=5
)


@steady
@given(simple, st.sampled_from(["'{}'", '"{}"', "{}"]), st.sampled_from([" ", "   ", " \\\n "]))
def test_quoting_plain_words_and_blanks_mean_nothing(rest, quotes, blank):
    command = ["mytool", *rest]
    respelled = blank.join(["mytool", *(quotes.format(word) for word in rest)])
    assert shell_plan(" ".join(command), CWD) == shell_plan(respelled, CWD)


bare_words = st.text("ab1-_./:,@%+=", min_size=1, max_size=5) | st.sampled_from(["-n", "5", "."])


@steady
@given(
    programs | st.sampled_from(["if", "export", "time", "in", "git", "sed", "python"]),
    st.lists(bare_words, max_size=4),
    st.sampled_from([" ", "  "]),
)
def test_bare_commands_are_read_as_the_parser_reads_them(program, rest, blank):
    command = blank.join([program, *rest])
    assert shell_plan.__wrapped__(command, CWD) == parsed_plan(command, CWD)


simple_commands = st.sampled_from(
    ["pytest -x", "git add a b", "head -n 20", "cd sub", "cd ..", f"cd {CWD}", "cd", "time ls"]
    + ["cat ./f", "in", "export X", "python -m mypy a.py"]
)
joints = st.sampled_from([" && ", " | ", "  &&  ", " ; ", " || ", "|"])


@steady
@given(
    st.lists(st.tuples(simple_commands, joints), min_size=1, max_size=4),
    st.sampled_from(["", " # check", "  # a 'b", "# x", " #", "\n"]),
)
def test_joined_bare_commands_are_read_as_the_parser_reads_them(parts, end):
    command = "".join(word for part in parts for word in part)
    command = command[: len(command) - len(parts[-1][1])] + end
    assert shell_plan.__wrapped__(command, CWD) == parsed_plan(command, CWD)


@steady
@given(st.text(string.printable, min_size=1, max_size=8), st.text(string.printable, max_size=8))
def test_different_quoted_words_are_different_commands(one, other):
    a, b = (shell_plan(f"mytool {_quoted(word)}", None).effect for word in (one, other))
    assert (a == b) == (one == other)


def _quoted(word):
    return "'" + word.replace("'", "'\\''") + "'"
