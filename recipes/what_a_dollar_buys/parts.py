"""Commands of a long recipe, and its parts, each of which is made once and kept."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any


def command(*words: str | Path, log: Path) -> None:
    """Run a command; what it says goes to a log. Raises SystemExit if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    told = " ".join(map(str, words))
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {told}\n")
        file.flush()
        done = subprocess.run([str(word) for word in words], stdout=file, stderr=file, check=False)
    if done.returncode != 0:
        raise SystemExit(f"this ended with {done.returncode}: see {log}\n{told}")


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """Return the JSON of a part that is whole, or make it and keep it with its CPU seconds."""
    if not path.exists():
        before = sum(os.times()[:4])  # of this process, and of those that it waited for
        found = {"value": make(), "cpu_s": round(sum(os.times()[:4]) - before, 1)}
        path.parent.mkdir(parents=True, exist_ok=True)
        (unfinished := path.with_suffix(".unfinished")).write_text(json.dumps(found), "utf-8")
        unfinished.rename(path)
        print(f"{path}: {found['cpu_s']} CPU s", flush=True)
    return json.loads(path.read_text("utf-8"))["value"]
