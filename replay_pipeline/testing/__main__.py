"""Run the loopback teacher server: `python -m replay_pipeline.testing --answers FILE`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from replay_pipeline.errors import ConfigError
from replay_pipeline.testing.server import script_of, serve_teachers


def main() -> None:
    """Serve until the process is stopped. The first line of the output is the base URL."""
    parser = argparse.ArgumentParser(prog="python -m replay_pipeline.testing", description=__doc__)
    parser.add_argument("--answers", type=Path, help="recorded answers, one JSON object per line")
    parser.add_argument("--faults", type=Path, help="fault rules, a JSON list")
    parser.add_argument("--script", type=Path, help="all options of the server, a JSON object")
    parser.add_argument("--latency", type=float, help="seconds per call")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--until-eof", action="store_true", help="end with standard input")
    arguments = parser.parse_args()
    try:
        bill = serve_teachers(
            script_of(_options(arguments)),
            host=arguments.host,
            port=arguments.port,
            until_eof=arguments.until_eof,
            on_ready=_say,
        )
    except (ConfigError, OSError, ValueError) as error:
        sys.exit(str(error))
    sys.stderr.write(f"{bill.n_charged} calls charged, ${bill.total_nano / 1e9:.6f}\n")


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if arguments.script:
        options |= json.loads(arguments.script.read_text("utf-8"))
    if arguments.answers:
        options["answers"] = str(arguments.answers)
    if arguments.faults:
        options["faults"] = json.loads(arguments.faults.read_text("utf-8"))
    if arguments.latency is not None:
        options["latency"] = arguments.latency
    return options


def _say(base_url: str) -> None:
    sys.stdout.write(base_url + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
