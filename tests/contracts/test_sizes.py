"""Classes, functions and calls stay as small as a reader can hold."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
MAX_CLASS, MAX_FUNCTION, MAX_PARAMETERS = 300, 60, 8
"""Lines of a class, lines of a function without its docstring, and parameters of a call."""
PARSERS = ("replay_pipeline/ingesters/", "replay_pipeline/replay/")
"""Where a class may be as long as the format that it reads."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def named_in_the_glossary() -> set[str]:
    text = (REPO / "docs" / "glossary.md").read_text("utf-8")
    _, _, section = text.partition("## Calls with more than eight parameters")
    return set(re.findall(r"`([\w.]+)`", section))


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in ("replay_pipeline", "trainer"):
        for path in sorted((REPO / package).rglob("*.py")):
            yield path.relative_to(REPO).as_posix(), ast.parse(path.read_text("utf-8"))


def functions(tree: ast.AST, above: str = "") -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(tree):
        name = f"{above}{node.name}" if isinstance(node, (ast.ClassDef, *FUNCTIONS)) else ""
        if isinstance(node, FUNCTIONS):
            yield name, node
        yield from functions(node, f"{name}." if name else above)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def n_lines(node: Function) -> int:
    first = node.body[0]
    is_docstring = ast.get_docstring(node) is not None
    return node.end_lineno - node.lineno + 1 - is_docstring * (first.end_lineno - first.lineno + 1)


def test_no_class_is_longer_than_a_reader_can_hold():
    found = [
        f"{path}: {node.name}: {node.end_lineno - node.lineno + 1}"
        for path, tree in modules()
        if not path.startswith(PARSERS)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno >= MAX_CLASS
    ]
    assert found == []


def test_no_function_is_longer_than_a_page():
    found = [
        f"{path}: {name}: {n_lines(node)}"
        for path, tree in modules()
        for name, node in functions(tree)
        if n_lines(node) > MAX_FUNCTION
    ]
    assert found == []


def n_parameters(node: Function, name: str) -> int:
    given = node.args
    return len(given.posonlyargs + given.args + given.kwonlyargs) - ("." in name)


def test_only_calls_that_the_glossary_names_have_many_parameters():
    found = {
        name.removesuffix(".__init__"): f"{path}: {name}"
        for path, tree in modules()
        for name, node in functions(tree)
        if n_parameters(node, name) > MAX_PARAMETERS
    }
    named = named_in_the_glossary()
    assert [where for call, where in found.items() if call not in named] == []
    assert named <= found.keys(), "a call that has become smaller need not be named"


@pytest.mark.parametrize(
    ("code", "name", "lines", "parameters"),
    [
        ("def f(a, b, *, c): ...", "f", 1, 3),
        ('class A:\n  def g(self, a):\n    """Say\n\n    more."""\n    return a', "A.g", 2, 1),
        ("async def h():\n  def inner(a): ...\n  return inner", "h", 3, 0),
    ],
)
def test_they_are_counted_as_a_reader_counts_them(code, name, lines, parameters):
    node = dict(functions(ast.parse(code)))[name]
    assert (n_lines(node), n_parameters(node, name)) == (lines, parameters)
