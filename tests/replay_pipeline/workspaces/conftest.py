"""The box that commands run in."""

import copy

import msgspec
import pytest

from replay_pipeline.workspaces.sandbox import CommandLimits, Sandbox


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
