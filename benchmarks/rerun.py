"""A second `ingest` over a corpus that did not change: what does it read?

    python benchmarks/rerun.py [SESSIONS...] [--gigabytes 10] [--json FILE]

The corpus is the sessions, linked under other names until it is as large as asked. Both runs are the
command of a user, each in a process of its own; bytes are what the process read, by the kernel's count
(`rchar`), less what a second run over a single session reads: the program itself.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_pipeline.testing.sample import SESSIONS_DIR

_CHILD = """
import json, resource, sys, time
sys.argv = ["replay-pipeline", "ingest", *sys.argv[1:]]
from replay_pipeline.cli import app
try:
    app(standalone_mode=False)
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    read = next(l for l in open("/proc/self/io") if l.startswith("rchar"))
    print("measured", json.dumps({
        "bytes_read": int(read.split()[1]),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "rss_mib": used.ru_maxrss // 1024,
    }))
"""


def link(sessions: list[Path], folder: Path, n_bytes: int) -> int:
    """Link sessions into `folder`, a copy in each round, and return the bytes they hold."""
    total = 0
    for round_, path in _rounds(sessions):
        if total >= n_bytes:
            return total
        place = folder / f"project-{round_}" / f"{round_:08x}-{path.name}"
        place.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, place)
        total += path.stat().st_size
    return total


def _rounds(sessions: list[Path]) -> Iterator[tuple[int, Path]]:
    round_ = 0
    while sessions:
        yield from ((round_, path) for path in sessions)
        round_ += 1


def ingest(corpus: Path, data: Path) -> dict[str, Any]:
    """Run the command and return what it read and took."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(corpus), "--data", str(data)],
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("measured "))
    return json.loads(line.removeprefix("measured "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sessions", nargs="*", type=Path, help="by default the bundled sample")
    parser.add_argument("--gigabytes", type=float, help="10, of the sample 0.01")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gigabytes = options.gigabytes or (10 if options.sessions else 0.01)
    with tempfile.TemporaryDirectory() as folder:
        # Links want one file system, and the sessions' own folder is not written to.
        for number, path in enumerate(options.sessions or [SESSIONS_DIR]):
            shutil.copytree(path, Path(folder) / "sessions" / str(number))
        files = sorted((Path(folder) / "sessions").rglob("*.jsonl"))
        corpus, data, empty = (Path(folder) / name for name in ("corpus", "data", "empty"))
        n_bytes = link(files, corpus, int(gigabytes * 1e9))
        link(files, empty, 1)  # one session: what the program reads of itself
        ingest(empty, empty / "data")
        itself = ingest(empty, empty / "data")
        time.sleep(2)  # a file changed within the last second is looked at again
        first = ingest(corpus, data)
        second = ingest(corpus, data)
        report = {"corpus_bytes": n_bytes, "itself": itself, "first": first, "second": second}
        again = max(second["bytes_read"] - itself["bytes_read"], 0)
        report["share_read_again"] = round(again / n_bytes, 6)
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
