"""Programs that train, as forks of a process that has loaded torch and TRL."""

import os
import subprocess
from pathlib import Path

from tests.support.forked import BIN, forked
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
SMALL = ("tiny.hidden_size=32", "tiny.vocab_size=512")
"""Settings of a model that trains in seconds."""


def words_of(*settings: str) -> list[str]:
    """Settings as words of the command line."""
    return [word for setting in settings for word in ("--set", setting)]


class Program(subprocess.Popen):
    """A program of this Python.

    Args:
        words: `-m` and a module, and its arguments.
        errors: the file that takes what it writes to standard error.
        variables: are put over those of this process.
    """

    def __init__(self, *words: str, errors: Path, **variables: str) -> None:
        self._errors = errors
        command = forked([BIN / "python", *words], "trainer")
        with errors.open("ab") as file:
            super().__init__(
                command,
                cwd=ROOT,
                env=os.environ | variables,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )

    def ended(self, timeout: float) -> tuple[int, str]:
        """Wait for the end. Gives the exit status and what was written to standard error."""
        return self.wait(timeout), self._errors.read_text()


def start_ranks(*words: str, n: int, folder: Path, **variables: str) -> list[Program]:
    """Start the data-parallel ranks of one run, as torchrun does."""
    variables |= {
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(n),
    }
    return [
        Program(*words, errors=folder / f"errors{rank}", **variables, RANK=rank, LOCAL_RANK=rank)
        for rank in map(str, range(n))
    ]
