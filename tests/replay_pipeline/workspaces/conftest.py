"""The box that commands run in."""

import copy
import os
from pathlib import Path

import msgspec
import pytest

from replay_pipeline.workspaces.sandbox import CommandLimits, Sandbox


@pytest.fixture(autouse=True)
def _open_to_the_box(tmp_path: Path) -> None:
    """Let everybody read the test's own folders: of root, the box runs as nobody."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and "pytest-of-" in str(folder):
            folder.chmod(0o755)


@pytest.fixture(scope="module")
def box():
    """A small sandbox. Where none can be made, what needs it fails and says what to install."""
    return Sandbox(
        limits=CommandLimits(
            timeout_s=30.0, memory_bytes=1_000_000_000, disk_bytes=20_000_000, n_processes=60
        )
    )


@pytest.fixture
def in_box(box):
    """Run a command in the box."""

    def run(command, files=None, **limits):
        own = copy.copy(box)
        own.limits = msgspec.structs.replace(box.limits, **limits)
        return own.run(command, root="/work/tide", files=files or {}, cwd="/work/tide")

    return run
