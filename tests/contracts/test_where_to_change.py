"""The table "Where do I change …" of CONTRIBUTING names files that exist, and what stands in them."""

import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
CODE = re.compile(r"`([^`]+)`")


def rows() -> list[tuple[str, list[str], list[str]]]:
    """What to change, the files, and the thing to look for in each of them."""
    text = (REPO / "CONTRIBUTING.md").read_text("utf-8")
    table = text.split("| to change | files | look for |\n|---|---|---|\n")[1].split("\n\n")[0]
    cells = [line.strip("|").split("|") for line in table.splitlines()]
    return [
        (what.strip(), CODE.findall(files), CODE.findall(names)) for what, files, names in cells
    ]


def contents(name: str) -> str:
    top = REPO if (REPO / name.split("/")[0]).is_dir() else REPO / "replay_pipeline"
    path = top / name
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return "\n".join(file.read_text("utf-8") for file in files if file.is_file())


@pytest.mark.parametrize(
    ("files", "names"), [row[1:] for row in rows()], ids=[r[0] for r in rows()]
)
def test_each_file_holds_the_thing_that_its_row_names(files, names):
    assert 1 <= len(files) == len(names) <= 3
    for file, name in zip(files, names, strict=True):
        found = re.search(rf"(?<!\w){re.escape(name)}(?!\w)", contents(file))
        assert found, f"{file} does not hold {name}"


def test_the_table_answers_at_least_25_questions():
    assert len({what for what, *_ in rows()}) == len(rows()) >= 25
