"""Every page of `recipes/` runs as it stands, and gives what it says to expect.

The scripts of a page run in order, in a copy of the repository beside the dataset of `make demo`. What a
script needs besides is named on its fence; `NEEDS="gpu hours"` says that it is here.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.pages import PAGES, REPO, blocks, missing

WEIGHTS = REPO / "build" / "real-model"
HERE = {*os.environ.get("NEEDS", "").split(), *(["weights"] if WEIGHTS.exists() else ())}
ASKED = os.environ.get("RECIPES", "").split() or [page.parent.name for page in PAGES]


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the demo; give the repository's copy that has it."""
    copy = tmp_path_factory.mktemp("pages") / "copy"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPO, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if (REPO / name).is_file():
            shutil.copy(REPO / name, copy / name)
    if WEIGHTS.exists():
        (copy / "build").mkdir()
        (copy / "build" / "real-model").symlink_to(WEIGHTS)
    shell("replay-pipeline demo", copy)
    return copy


def shell(script: str, folder: Path) -> str:
    """Run a script as a user would type it, with this environment's programs before the system's."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_runs_as_it_stands(page: Path, request: pytest.FixtureRequest) -> None:
    if page.parent.name not in ASKED:
        pytest.skip("not asked for")
    run = [block for block in blocks(page) if block.needs <= HERE]
    if not run:
        pytest.skip(f"needs {sorted(set().union(*(block.needs for block in blocks(page))))}")
    folder = request.getfixturevalue("demo")
    for block in run:
        output = shell(block.script, folder)
        lost = missing(block.expected, output)
        assert not lost, f"not in the output of\n{block.script}:\n{lost}\n\n{output[-6000:]}"
