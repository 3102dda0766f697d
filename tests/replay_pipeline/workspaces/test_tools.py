"""File tools on a tree: texts and kinds of errors are the client's, effects are those of the call."""

import subprocess
from pathlib import Path

import pytest

from replay_pipeline.ingesters.labels import error_kind
from replay_pipeline.storage.processes import child_environment
from replay_pipeline.workspaces.tools import ToolRun
from replay_pipeline.workspaces.tree import FileTree

TREE = {
    "tide/high.py": "def high():\n    return 3\n\n\ndef higher():\n    return 3\n",
    "tide/low.py": "def low():\n    return 1\n",
    "notes/tide.ipynb": "{}",
    "big.txt": "x" * 300_000,
    "long.py": "tide = high(4) + low(2) + mean(3)  # m\n" * 2_000,
    ".github/run.yml": "on: push\n",
}
HIGH = "/p/tide/high.py"


def run(read=None):
    return ToolRun(FileTree("/p", TREE), cwd="/p", read=read)


def edit(old, new, **more):
    return {"file_path": HIGH, "old_string": old, "new_string": new, **more}


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("Read", {"file_path": "/p/none.py"}, "not_found"),
        ("Read", {"file_path": "/p/tide"}, "is_directory"),
        ("Read", {"file_path": "/p/big.txt"}, "too_large"),
        ("Read", {"file_path": "/p/long.py"}, "too_large"),
        ("Read", {"file_path": "/p/long.py", "offset": 100, "limit": 1_900}, "too_large"),
        ("Edit", edit("return 5", "return 6"), "string_not_found"),
        ("Edit", edit("return 3", "return 6"), "multiple_matches"),
        ("Edit", edit("return 3", "return 3"), "no_change"),
        ("Edit", {**edit("a", "b"), "file_path": "/p/none.py"}, "not_found"),
        ("Grep", {"pattern": "x", "path": "/p/none"}, "not_found"),
        ("Glob", {"pattern": "*", "path": "/p/none"}, "not_found"),
        ("Read", {}, "invalid_input"),
    ],
)
def test_a_call_that_fails_has_the_kind_that_the_record_of_the_client_would_have(
    name, arguments, kind
):
    answer = run().call(name, arguments)
    assert answer.error_kind == kind
    assert error_kind(answer.text) == kind


def test_a_file_that_was_not_read_or_has_changed_since_is_not_edited():
    change = edit("def higher", "def highest")
    unread = run(read={}).call("Edit", change)
    assert unread.error_kind == error_kind(unread.text) == "not_read_yet"
    stale = run(read={HIGH: "def high(): ...\n"}).call("Edit", change)
    assert stale.error_kind == error_kind(stale.text) == "modified_since_read"
    after_read = run(read={})
    assert after_read.call("Read", {"file_path": "tide/high.py"}).error_kind is None
    assert after_read.call("Edit", change).error_kind is None
    assert run(read={}).call("Write", {"file_path": HIGH, "content": ""}).error_kind == (
        "not_read_yet"
    )
    assert run(read={}).call("Write", {"file_path": "/p/new.py", "content": ""}).error_kind is None


def test_changes_are_kept_for_the_calls_that_follow_and_the_tree_stays():
    one = run()
    one.call("Edit", edit("return 3\n\n", "return 4\n\n"))
    one.call("MultiEdit", {"file_path": HIGH, "edits": [
        {"old_string": "return 4", "new_string": "return 5"},
        {"old_string": "return 3", "new_string": "return 6"},
    ]})  # fmt: skip
    one.call("Write", {"file_path": "new.py", "content": "x = 1\n"})
    after = TREE["tide/high.py"].replace("return 3", "return 5", 1).replace("return 3", "return 6")
    assert one.view.effect() == {HIGH: after, "/p/new.py": "x = 1\n"}
    assert one.view.tree.file(HIGH).text == TREE["tide/high.py"]


def test_of_many_edits_none_is_made_when_one_fails():
    one = run()
    answer = one.call("MultiEdit", {"file_path": HIGH, "edits": [
        {"old_string": "def higher", "new_string": "def highest"},
        {"old_string": "nothing", "new_string": "something"},
    ]})  # fmt: skip
    assert answer.error_kind == "string_not_found"
    assert one.view.effect() == {}


def test_straight_quotes_find_curly_ones_and_a_text_taken_out_takes_its_line_end():
    text = "say “high”\nlow\nend\n"
    one = ToolRun(FileTree("/p", {"a.md": text}), cwd="/p")
    one.call("Edit", {"file_path": "a.md", "old_string": 'say "high"', "new_string": "say it"})
    one.call("Edit", {"file_path": "a.md", "old_string": "low", "new_string": ""})
    assert one.view.effect() == {"/p/a.md": "say it\nend\n"}


def test_read_shows_the_lines_of_its_window():
    answer = run().call("Read", {"file_path": HIGH, "offset": 2, "limit": 2})
    assert answer.text == "     2→    return 3\n     3→"


def test_of_a_file_of_too_many_tokens_a_window_is_read():
    """The client counts what it would show, not the file."""
    answer = run().call("Read", {"file_path": "/p/long.py", "offset": 1_501, "limit": 500})
    assert (answer.error_kind, answer.text.count("\n")) == (None, 499)
    whole = run().call("Read", {"file_path": "/p/long.py"})
    assert "tokens) exceeds maximum allowed tokens (25000)" in whole.text
    behind = run().call("Read", {"file_path": "/p/long.py", "offset": 90_000}).text
    assert behind.startswith("<system-reminder>Warning: the file exists but is shorter than")


def test_what_is_not_known_is_not_called_missing():
    answer = run().call("Read", {"file_path": "/etc/hosts"})
    assert (answer.error_kind, answer.is_known) == ("unknown", False)
    assert not run().call("WebFetch", {"url": "https://example.org"}).is_known
    assert not run().call("Grep", {"pattern": "x", "type": "cobol"}).is_known


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    for name, text in TREE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    "pattern", ["return [0-9]$", "^def high", "on: (push|pull)", "absent", "x{7}"]
)
@pytest.mark.parametrize("ignore_case", [False, True])
def test_lines_that_are_found_are_those_of_grep(on_disk, pattern, ignore_case):
    options = ["-rnE", *(["-i"] if ignore_case else [])]
    done = subprocess.run(
        ["grep", *options, pattern, "."], cwd=on_disk, capture_output=True, text=True
    )
    wanted = {line.removeprefix("./") for line in done.stdout.splitlines()}
    answer = run().call(
        "Grep", {"pattern": pattern, "output_mode": "content", "-n": True, "-i": ignore_case}
    )
    assert {*answer.found} == wanted


@pytest.mark.parametrize("context", [{"-A": 1}, {"-B": 2}, {"-C": 1}])
def test_lines_around_are_those_of_grep_as_the_client_shows_them(on_disk, context):
    options = [f"{name}{n}" for name, n in context.items()]
    done = subprocess.run(
        ["grep", "-rnE", *options, "return [13]", on_disk], capture_output=True, text=True
    )
    # All before the first colon is a path to the client: a line of the context keeps its folder.
    lines = [line.replace(str(on_disk), "/p") for line in done.stdout.splitlines()]
    wanted = sorted(line.removeprefix("/p/") if ":" in line else line for line in lines)
    assert "--" in wanted
    answer = run().call("Grep", {"pattern": "return [13]", "output_mode": "content", **context})
    assert sorted(answer.found) == wanted


@pytest.mark.parametrize(
    "pattern", ["**/*.py", "tide/*", "*/*.{py,ipynb}", "*.txt", "tide/[hl]*.py"]
)
def test_a_glob_finds_what_python_finds(on_disk, pattern):
    patterns = (
        [pattern.replace("{py,ipynb}", end) for end in ("py", "ipynb")]
        if "{" in pattern
        else [pattern]
    )
    wanted = {
        str(Path(path).relative_to(on_disk)) for each in patterns for path in on_disk.glob(each)
    }
    assert {*run().call("Glob", {"pattern": pattern}).found} == wanted


def test_globs_types_and_modes_narrow_a_search():
    search = {"pattern": "return|push"}
    assert run().call("Grep", {**search, "glob": "*.py"}).found == ("tide/high.py", "tide/low.py")
    assert run().call("Grep", {**search, "glob": "!tide/**"}).found == (".github/run.yml",)
    assert run().call("Grep", {**search, "type": "yaml"}).found == (".github/run.yml",)
    counted = run().call("Grep", {**search, "output_mode": "count", "path": "tide"})
    assert counted.found == ("tide/high.py:2", "tide/low.py:1")
    assert counted.text.endswith("\n\nFound 3 total occurrences across 2 files.")
    across = {"pattern": r"high\(\):\n    return", "multiline": True}
    assert run().call("Grep", across).found == ("tide/high.py",)
    assert run().call("Grep", {"pattern": across["pattern"]}).found == ()


IGNORED = {
    ".gitignore": "# built\ndocs/plans\n*.log\n/dist/\n!keep.log\nbuild/\n[!a\n",
    "docs/plans/tide.md": "high\n",
    "docs/plans/more/tide.md": "high\n",
    "docs/high.md": "high\n",
    "sub/docs/plans/tide.md": "high\n",
    "tide.log": "high\n",
    "sub/keep.log": "high\n",
    "dist/tide.js": "high\n",
    "sub/dist/tide.js": "high\n",
    "sub/build/tide.o": "high\n",
    "sub/build.md": "high\n",
    "low/.gitignore": "*.md\n!docs/\n",
    "low/tide.md": "high\n",
    "low/tide.py": "high\n",
}


def test_grep_leaves_out_what_git_ignores_and_finds_it_where_it_is_named(tmp_path):
    """Held to `git ls-files`, which reads the same files."""
    for name, text in IGNORED.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True, env=child_environment())
    listing = ["git", "ls-files", "--others", "--exclude-standard"]
    done = subprocess.run(
        listing, cwd=tmp_path, capture_output=True, text=True, check=True, env=child_environment()
    )
    run = ToolRun(FileTree("/p", IGNORED), cwd="/p")
    found = {*run.call("Grep", {"pattern": "high"}).found}
    assert found == {name for name in done.stdout.split() if not name.endswith(".gitignore")}
    assert run.call("Grep", {"pattern": "high", "path": "tide.log"}).found == ("tide.log",)
    inside = run.call("Grep", {"pattern": "high", "path": "docs/plans"}).found
    assert {*inside} == {"docs/plans/tide.md", "docs/plans/more/tide.md"}
    assert "docs/plans/tide.md" in run.call("Glob", {"pattern": "**/*.md"}).found


def test_a_pattern_that_takes_others_forever_is_no_matter():
    slow = ToolRun(FileTree("/p", {"a.txt": "a" * 5_000 + "!"}), cwd="/p")
    assert slow.call("Grep", {"pattern": "(a*)*(a*)*b"}).found == ()
    assert slow.call("Grep", {"pattern": "("}).error_kind == "other"


def test_a_search_of_many_megabytes_finds_what_stands_at_their_ends():
    many = {f"{n}.txt": "x" * 6_000_000 + f"\nend {n}\n" for n in range(7)}
    large = ToolRun(FileTree("/p", many), cwd="/p")
    answer = large.call("Grep", {"pattern": "^end [0-9]$", "output_mode": "content"})
    assert answer.found == tuple(f"{n}.txt:2:end {n}" for n in range(7))
