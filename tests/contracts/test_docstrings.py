"""First lines of docstrings say what comes back, or what is done, in an imperative sentence."""

import ast
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
NO_FIRST_WORD = {"Give", "Gives", "Tell", "Tells", "Say", "Says", "Whether", "See"}
"""`See` as in "See that", for which the word is Check."""


def first_lines(package: str) -> dict[str, str]:
    found = {}
    for path in sorted((REPO / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                words = (ast.get_docstring(node) or "").partition("\n")[0]
                found[f"{path.relative_to(REPO)}:{node.lineno} {node.name}"] = words
    return found


@pytest.mark.parametrize("package", ["replay_pipeline", "trainer", "tools"])
def test_no_first_line_begins_with_a_word_that_says_nothing(package):
    found = first_lines(package)
    assert len(found) > 10
    assert {
        where: words
        for where, words in found.items()
        if words.partition(" ")[0].rstrip(",:;") in NO_FIRST_WORD
    } == {}
