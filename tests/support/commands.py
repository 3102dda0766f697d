"""`replay-pipeline` as a user types it, as a fork of what has loaded its packages."""

import subprocess
from pathlib import Path
from typing import Any

from replay_pipeline.storage.processes import child_environment
from tests.support.forked import BIN, forked, forked_python


def command(
    *words: str | Path,
    cwd: Path,
    children: str | None = None,
    options: Any = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run it in a folder, which is its home too, to its end.

    Args:
        words: what follows the program's name.
        cwd: the folder.
        children: what it takes for this Python when it starts programs; by default teachers are forks.
        options: of `subprocess.run`.
        environment: variables besides.
    """
    return subprocess.run(
        forked([BIN / "replay-pipeline", *words], children=children or forked_python("teachers")),
        cwd=cwd, env=child_environment(**{"HOME": str(cwd), "COLUMNS": "200"} | environment),
        capture_output=True, text=True, timeout=500, **(options or {}),
    )  # fmt: skip
