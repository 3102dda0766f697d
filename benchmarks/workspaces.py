"""The cost of trying file tools on the files behind states: CPU seconds and memory, by the size of a repository.

    python benchmarks/workspaces.py [--megabytes 50 1000] [--verdicts 1000]

Each repository has files of a megabyte, and a session that reads some of them. At each read two answers are
tried: the read itself, and an edit of a text that is not there. One search goes through the whole tree.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from replay_pipeline.settings import Settings
from replay_pipeline.stages.work.workspaces import Workspaces
from replay_pipeline.storage.processes import child_environment
from replay_pipeline.workspaces.verdicts import Judge, StatePlace, TriedCall

_WHO = ("-c", "user.name=Mira", "-c", "user.email=mira@example.org", "-c", "core.compression=0")


def repository(root: Path, n_files: int) -> list[Path]:
    """Commit files of a megabyte, and return where they are."""
    rng = random.Random(1)
    lines = [f"{rng.getrandbits(280):070x}" for _ in range(14_000)]
    paths = [root / f"part{number % 25}" / f"file{number}.txt" for number in range(n_files)]
    for path in paths:
        rng.shuffle(lines)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))
    for arguments in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "Begin"]):
        subprocess.run(["git", *_WHO, *arguments], cwd=root, check=True, env=child_environment())
    return paths


def rows(root: Path, paths: list[Path]) -> list[dict[str, Any]]:
    """A session that reads forty lines of each path, a second apart."""
    found: list[dict[str, Any]] = []
    for n, path in enumerate(paths):
        lines = path.read_text().split("\n")[:40]
        moment = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(time.time() + 60 + n))
        common = {"sessionId": "s", "cwd": str(root), "gitBranch": "main", "timestamp": moment}
        arguments = {"file_path": str(path), "limit": 40}
        call = {"type": "tool_use", "id": f"call{n}", "name": "Read", "input": arguments}
        message = {"id": f"m{n}", "role": "assistant", "content": [call]}
        found.append({"type": "assistant", "uuid": f"a{n}", "message": message, **common})
        text = "\n".join(f"{number:>6}→{line}" for number, line in enumerate(lines, 1))
        result = {"type": "tool_result", "tool_use_id": f"call{n}", "content": text}
        answer = {"role": "user", "content": [result]}
        found.append({"type": "user", "uuid": f"u{n}", "message": answer, **common})
    return found


def measure(folder: Path, n_files: int, n_verdicts: int) -> None:
    """Print the costs of verdicts on one repository."""
    root = folder / "tides"
    paths = repository(root, n_files)
    wanted = [paths[n * 7 % len(paths)] for n in range(n_verdicts // 2)]
    log = folder / "projects" / "tides" / "s.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("\n".join(map(json.dumps, rows(root, wanted))))
    began, judge, n, n_wrong = time.process_time(), Judge("files"), 0, 0
    search = TriedCall("Grep", {"pattern": "no such text", "path": str(root)})
    work = Workspaces(Settings(), sources=[log], repositories=[root])
    for steps, history in work.histories():
        for order, step in enumerate(steps.steps):
            history.enter(order, step)
            place = StatePlace(history, step)
            path = step.arguments["file_path"]
            stale = {"file_path": path, "old_string": "no such text", "new_string": "x"}
            tried = [TriedCall("Read", step.arguments), TriedCall("Edit", stale)]
            found = [judge.judge(place, [call]).status for call in tried]
            n, n_wrong = n + len(found), n_wrong + (found != ["works", "fails"])
            history.take(step)
        verdicts_s = time.process_time() - began
        judge.judge(place, [search])
    search_s = time.process_time() - began - verdicts_s
    rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"| {n_files} MB | {1000 * verdicts_s / n:.1f} | {n_wrong} of {n} | {search_s:.1f} | {rss_mib} MiB |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50])
    parser.add_argument("--verdicts", type=int, default=1000)
    parser.add_argument("--row", action="store_true", help="Measure one size, without a heading.")
    options = parser.parse_args()
    if not options.row:  # a process each: the peak of memory is that of a process
        print("| repository | CPU s for 1,000 verdicts | wrong | CPU s for a search | peak RSS |")
        print("|---|---|---|---|---|", flush=True)
        for size in options.megabytes:
            part = ["--row", "--megabytes", str(size), "--verdicts", str(options.verdicts)]
            subprocess.run([sys.executable, __file__, *part], check=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options.megabytes[0], options.verdicts)


if __name__ == "__main__":
    main()
