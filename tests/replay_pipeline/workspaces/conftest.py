"""The box that commands run in, on machines where there can be one."""

import copy
import os
import sys
from pathlib import Path

import msgspec
import pytest

from replay_pipeline.errors import ConfigError
from replay_pipeline.workspaces.sandbox import CommandLimits, Sandbox


@pytest.fixture(autouse=True)
def _open_to_the_box(tmp_path: Path) -> None:
    """Let everybody read the test's own folders: of root, the box runs as nobody."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and "pytest-of-" in str(folder):
            folder.chmod(0o755)


@pytest.fixture(scope="module")
def box():
    """A small sandbox; where none can be made, the sentence that says why."""
    limits = CommandLimits(
        timeout_s=30.0, memory_bytes=1_000_000_000, disk_bytes=20_000_000, n_processes=60
    )
    try:
        return Sandbox(limits=limits)
    except ConfigError as refusal:
        return str(refusal)


@pytest.fixture
def in_box(box, capsys):
    """Run a command in the box, or hold the refusal to what it must say.

    On a machine without bubblewrap a test of it shows that nothing is run, and why; it says so.
    """
    if isinstance(box, str):
        with capsys.disabled():
            sys.stderr.write(f"\nno sandbox here, so only its refusal is tested: {box}\n")
        assert "commands cannot be run in bubblewrap here" in box
        assert "apt-get install bubblewrap" in box
        assert 'workspaces.execute = "files"' in box
        return None

    def run(command, files=None, **limits):
        own = copy.copy(box)
        own.limits = msgspec.structs.replace(box.limits, **limits)
        return own.run(command, root="/work/tide", files=files or {}, cwd="/work/tide")

    return run
