"""Write `deploy/requirements.lock`: the pins of `constraints.txt` with the hashes of their files.

    python -m tools.lock REPORT.json [REPORT.json ...]

Each report is what `pip install --dry-run --ignore-installed --no-deps -r constraints.txt --report
REPORT.json` says under one version of Python (`make lock` asks several): which file it would take, and
its hash. A pin has the files of all of them. A file of the build for CPUs stands for the plain version.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

_HEAD = """\
# The pins of constraints.txt with the hashes of their files, for Linux on x86-64 and the versions of
# Python that `make lock` was run with. Written by tools/lock.py; not for editing.
#   pip install --require-hashes -r deploy/requirements.lock
"""


def lock(reports: Sequence[Path]) -> str:
    """Put the files of all reports together, by package."""
    hashes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for report in reports:
        for found in json.loads(report.read_text("utf-8"))["install"]:
            about, archive = found["metadata"], found["download_info"]["archive_info"]
            name = about["name"].lower().replace("_", "-").replace(".", "-")
            version = about["version"].partition("+")[0]
            hashes[name, version].add(archive["hashes"]["sha256"])
    lines = [
        " \\\n    ".join(
            [f"{name}=={version}", *(f"--hash=sha256:{each}" for each in sorted(found))]
        )
        for (name, version), found in sorted(hashes.items())
    ]
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path("deploy/requirements.lock").write_text(
        lock([Path(name) for name in sys.argv[1:]]), "utf-8"
    )
