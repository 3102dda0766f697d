"""Edits that count as the same change give the same file, on every file that both apply to."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay_pipeline.actions.edits import Edit, are_same_change, edits_of

steady = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
files = st.lists(st.sampled_from("abcd"), min_size=2, max_size=10).map("\n".join)
pieces = st.lists(st.sampled_from(["a", "b", "c", "d", "\n", "x"]), max_size=4).map("".join)
free_edits = st.lists(st.builds(Edit, pieces, pieces, st.booleans()), min_size=1, max_size=3)


def applied(file, edits):
    """The file after the edits, or `None` where the tool would refuse one."""
    for edit in edits:
        n = sum(file.startswith(edit.old, i) for i in range(len(file)))
        if not edit.old or n == 0 or (n > 1 and not edit.is_everywhere):
            return None
        file = file.replace(edit.old, edit.new)
    return file


@st.composite
def edits_of_a_file(draw, file):
    """One to three edits that fit the file, each with some context."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(file) - 1))
        end = draw(st.integers(start + 1, len(file)))
        found.append(Edit(file[start:end], draw(pieces)))
    return tuple(found)


@st.composite
def two_lists_for_a_file(draw):
    file = draw(files)
    ours = draw(edits_of_a_file(file))
    kind = draw(st.sampled_from(["shuffled", "widened", "other", "free"]))
    if kind == "shuffled":
        return file, ours, tuple(draw(st.permutations(ours)))
    if kind == "widened":
        return file, ours, tuple(_widened(draw, file, edit) for edit in ours)
    if kind == "other":
        return file, ours, draw(edits_of_a_file(file))
    return file, ours, tuple(draw(free_edits))


def _widened(draw, file, edit):
    start = file.find(edit.old)
    before = file[draw(st.integers(0, start)) : start]
    stop = start + len(edit.old)
    after = file[stop : draw(st.integers(stop, len(file)))]
    return Edit(before + edit.old + after, before + edit.new + after)


@pytest.mark.slow
@settings(steady, max_examples=500)
@given(two_lists_for_a_file())
def test_same_changes_give_the_same_file(case):
    file, ours, theirs = case
    if are_same_change(ours, theirs):
        one, other = applied(file, ours), applied(file, theirs)
        assert one is None or other is None or one == other
    assert are_same_change(ours, theirs) == are_same_change(theirs, ours)
    assert are_same_change(ours, ours)


@settings(steady, max_examples=200)
@given(files, st.data())
def test_an_edit_with_more_context_is_the_same_change(file, data):
    [edit, *_] = data.draw(edits_of_a_file(file))
    wide = _widened(data.draw, file, edit)
    if wide.old.count(edit.old) == 1 and applied(file, [edit]) is not None:
        overlaps = [i for i in range(len(wide.old)) if wide.old.startswith(edit.old, i)]
        assert are_same_change((edit,), (wide,)) or len(overlaps) > 1


def test_malformed_edits_are_no_edits():
    assert edits_of({"edits": [{"old_string": "a"}]}) is None
    assert edits_of({"edits": ["a"]}) is None
    assert edits_of({"old_string": "a", "new_string": "b"}) == (Edit("a", "b"),)


def test_a_long_edit_with_more_context_is_the_same_change_too():
    old, new = "one line\n" * 4_000, "another line\n" * 4_000
    wide = Edit(f"before\n{old}", f"before\n{new}")
    assert are_same_change((Edit(old, new),), (wide,))
    assert not are_same_change((Edit(old, f"{new}x"),), (wide,))
