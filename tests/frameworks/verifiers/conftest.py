"""A home folder without credentials."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """Variables of a command that finds the recipe's taskset and no credentials."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PRIME")}
    paths = [str(ROOT), str(ROOT / "recipes" / "verifiers")]
    home = tmp_path / "home"
    home.mkdir()
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "HOME": str(home), "NO_KEY": "none"}
