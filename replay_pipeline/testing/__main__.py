"""The process of `TeacherServer`: `python -m replay_pipeline.testing SCRIPT PORT`."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from replay_pipeline.errors import ConfigError
from replay_pipeline.testing.router import Router, Script
from replay_pipeline.testing.server import serve_teachers


def main() -> None:
    """Serve until standard input ends. The first line of the output is the base URL."""
    run(lambda options: Router(Script(**options)))


def run(router_of: Callable[[dict[str, Any]], Router]) -> None:
    """Serve what the named script makes of a router."""
    options = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    if options.get("answers"):
        options["answers"] = Path(options["answers"])
    try:
        say = partial(print, flush=True)
        serve_teachers(router_of(options), port=int(sys.argv[2]), until_eof=True, on_ready=say)
    except (ConfigError, OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
