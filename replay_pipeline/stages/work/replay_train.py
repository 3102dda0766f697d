"""The command `replay-train`: the trainer of this package, whatever else is called `trainer`.

A folder may hold a `trainer.py` of its own, and other packages install a top-level `trainer`. So this
reads nothing from the current folder, and refuses a `trainer` that is not ours by its name.
"""

import importlib
import importlib.util
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

HOME = Path(__file__).resolve().parents[3]
"""Where this package is installed, and the trainer beside it."""
_MARKS = {"__init__.py": "compose_loss", "__main__.py": "PRETRAINED_CONFIG"}
"""A word that stands in these files of ours, and would not in another's that were written over them."""


def main() -> int:
    """Run the command line of the trainer. If `trainer` is not ours, say whose it is, and return 2."""
    here = Path.cwd()
    sys.path[:] = [
        entry for entry in sys.path if (place := Path(entry).resolve()) != here or place == HOME
    ]
    if reason := _foreign():
        sys.stderr.write(
            f"error: {reason}. Install replay-pipeline into an environment without it\n"
        )
        return 2
    return importlib.import_module("trainer.__main__").main()


def _foreign() -> str:
    """Return whose `trainer` would be imported, if it is not ours."""
    found = importlib.util.find_spec("trainer")
    origin = Path(found.origin) if found is not None and found.origin else None
    if origin is None or origin.resolve().parent != HOME / "trainer":
        return (
            f"`trainer` is {origin or 'missing'}, and not the trainer of replay-pipeline in {HOME}"
        )
    for name, mark in _MARKS.items():
        if mark not in (origin.parent / name).read_text("utf-8", "replace"):
            others = {*packages_distributions().get("trainer", ())} - {"replay-pipeline"}
            who = ", ".join(sorted(others)) or "another package"
            return f"{origin.parent / name} is not ours any more: {who} has written over it"
    return ""


if __name__ == "__main__":
    sys.exit(main())
