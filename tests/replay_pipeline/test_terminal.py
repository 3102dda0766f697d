"""What a person reads at the end of a command, at 80 and at 120 columns, about real data of the sample."""

import re

import pytest

from replay_pipeline.stages.pages.sides import differ
from tests.support.messages import bash, call
from tests.terminal import FOLDER, WIDTHS, printed

NAMES = ("estimate", "run", "pairs", "rank", "status", "train")
COUNTED = ("no consensus", "too few answers", "early stop", "invalid action", "malformed arguments")


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> dict[str, str]:
    return printed(tmp_path_factory.mktemp("terminal"))


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_what_a_command_prints_is_what_was_read_and_found_good(shown, name, width):
    """`python -m tests.terminal` writes what is expected, to be read again before it is committed."""
    assert shown[f"{name}-{width}"] == (FOLDER / f"{name}-{width}.txt").read_text("utf-8")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_no_line_is_too_long_no_word_is_broken_and_the_last_line_says_what_is_next(name, width):
    text = (FOLDER / f"{name}-{width}.txt").read_text("utf-8")
    lines = text.rstrip("\n").split("\n")
    assert max(map(len, lines)) <= width
    assert re.fullmatch(r"Next: .*`.*\.", lines[-1])
    assert text.count("Next: ") == 1
    flowing = " ".join(re.sub("[┏━┳┓┃┡╇┩│└─┴┘┌┐]", " ", text).split())
    wide = (FOLDER / f"{name}-120.txt").read_text("utf-8")
    for words in COUNTED:
        assert (words in flowing) == (words in " ".join(wide.split()))
    if name in ("pairs", "status"):
        batches = [n for n, line in enumerate(lines) if re.search(r"2026-01-02-\d{4}-", line)]
        assert batches == list(range(batches[0], batches[0] + 2))  # a line each
    assert "none" not in "".join(line for line in lines if "run 0" in line)


def test_where_two_sides_differ_is_told_and_not_how_they_begin_alike():
    long = "pytest " + "tests/a/very/long/way/to/the/place " * 8
    told = differ((bash(f"{long}-x"), ""), (bash(f"{long}-k clock"), ""))
    assert told.rejected.endswith("-x")
    assert told.chosen.endswith("-k clock")
    assert max(map(len, told[1:])) < 60
    told = differ((call("Read", file_path="a.py"), ""), (call("Grep", pattern="x"), ""))
    assert told == ("", "Read a.py", "Grep x")
    one, other = (
        (call("Edit", file_path="a.py", new_string=text), "") for text in ("x = 1", "x = 1\ny = 2")
    )
    told = differ(one, other)
    assert told == ("Edit a.py", "new_string: x = 1", "new_string: ⏎ x = 1 ⏎ y = 2")
