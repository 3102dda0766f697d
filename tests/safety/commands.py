"""The program as a user starts it: by its own entry point, in a folder of theirs."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from replay_pipeline.storage.processes import child_environment


def program() -> str:
    """The installed command."""
    return str(Path(sys.executable).with_name("replay-pipeline"))


def cli(words: Sequence[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `replay-pipeline` in a folder, to its end."""
    return subprocess.run(
        [program(), *words],
        cwd=folder,
        env=child_environment(COLUMNS="300", **environment),
        capture_output=True,
        text=True,
        timeout=300,
    )
