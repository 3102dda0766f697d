"""The table of `CONTRIBUTING.md` that says where to change what names files that are there."""

import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PAGE = (REPO / "CONTRIBUTING.md").read_text("utf-8")
TABLE = PAGE.partition("\n## Where do I change")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (?!to change|-)(.+?) \| (.+?) \|$", TABLE, re.MULTILINE)
MAX_FILES = 3


def test_the_table_answers_at_least_25_questions():
    assert len(ROWS) >= 25
    assert len({question for question, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("question", "files"), ROWS)
def test_a_change_touches_few_files_and_they_exist(question, files):
    named = [name for name in re.findall(r"`([^`]+)`", files) if re.search(r"[./]", name)]
    paths = [name for name in named if not name.startswith("replay.")]
    assert 1 <= len(paths) <= MAX_FILES
    for name in paths:
        assert (REPO / "replay_pipeline" / name).exists() or (REPO / name).exists(), name
