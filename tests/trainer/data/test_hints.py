import pytest

from trainer.data.hints import JudgeHints, hint_for_row, template_hint


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("File has not been read yet. Read it first before writing to it.", "must be read"),
        ("File has been modified since read, either by the user", "Read it again"),
        ("String to replace not found in file.", "copy the exact text"),
        ("Found 3 matches of the string to replace", "more than once"),
        ("Error: No such tool available: Grep2", "Available: Read, Bash"),
        ("cat: x.py: No such file or directory", "does not exist"),
        ("InputValidationError: limit", "not valid for the tool"),
        ("bash: pytset: command not found", "not installed"),
        ("Command timed out after 2m", "out of time"),
        ("Permission denied", "not permitted"),
    ],
)
def test_a_known_error_gets_its_sentence(error, says):
    tools = [{"function": {"name": name}} for name in ("Read", "Bash")]
    assert says in template_hint({"hint": error, "tools": tools})


def test_an_unknown_error_is_told_as_it_is_and_shortened():
    hint = hint_for_row({"hint": "AssertionError: " + "x" * 5000})
    assert hint.startswith("The next attempt failed with: AssertionError")
    assert len(hint) < 700


@pytest.mark.parametrize("row", [{}, {"hint": None}, {"hint": "  "}])
def test_no_recorded_error_is_no_hint(row):
    assert hint_for_row(row) is None


def test_a_judge_is_asked_only_where_it_is_put_and_once_a_context():
    asked = []

    def complete(prompt: str) -> str:
        asked.append(prompt)
        return " Run the one test alone. "

    judge = JudgeHints(complete=complete)
    unknown, known = {"hint": "AssertionError: 1 != 2"}, {"hint": "file has not been read yet"}
    hints = [hint_for_row(unknown, (template_hint, judge)) for _ in range(2)]
    assert hints == ["Run the one test alone."] * 2
    assert len(asked) == 1
    assert "AssertionError" in asked[0]
    assert hint_for_row(known, (template_hint, judge)).startswith("A file must be read")
    assert len(asked) == 1
