"""What recorded calls give on rebuilt trees, where it isn't what they gave then.

    python benchmarks/commands.py SESSIONS --repository DIR [--sample 100] > MISSES.json

Counts the calls that are reproduced, by project and tool, and prints both outputs of each missed command that
only reads, to read them. The commands run in the sandbox: `--sample` of each project at most.
"""

import argparse
import json
import sys
from pathlib import Path

from replay_pipeline.settings import Settings
from replay_pipeline.stages.workspaces import Workspaces
from replay_pipeline.workspaces.fidelity import shares
from replay_pipeline.workspaces.sandbox import Sandbox


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sessions", type=Path)
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--sample", type=int, default=100)
    options = parser.parse_args()
    work = Workspaces(Settings(), sources=[options.sessions], repositories=[options.repository])
    found = list(work.checks(sandbox=Sandbox(), max_commands=options.sample))
    misses = [
        {
            "command": each.step.arguments["command"],
            "reason": each.reason,
            "recorded": each.step.text,
            "rebuilt": each.answer.text,
        }
        for each in found
        if each.step.name == "Bash" and not each.is_same
    ]
    json.dump({"projects": shares(found), "misses": misses}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
