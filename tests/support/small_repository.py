"""A small project of three tasks, each a recorded session, served as an environment by the program."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replay_pipeline.workspaces.sandbox import Sandbox
from tests.support.worked import Worked

CHECK = "python3 test_tide.py"
REQUESTS = ("High tide is 4 metres.", "High tide should be four.", "Make high tide 4.")
FILES = {
    "tide.py": "HIGH = 3\n",
    "low.py": "LOW = 1\n",
    "test_tide.py": "import tide\nassert tide.HIGH == 4, tide.HIGH\n",
}
RIGHT = {"old_string": "HIGH = 3", "new_string": "HIGH = 4"}
WRONG = {"old_string": "HIGH = 3", "new_string": "HIGH = 5"}


def record(folder: Path) -> Path:
    """Write the sessions, in which an agent looks and does nothing; gives the project's folder."""
    root = folder / "tides"
    for number, request in enumerate(REQUESTS):
        work = Worked(root, f"tides-{number}", start=f"2026-02-0{3 + number}T09:00:00.000Z")
        if not number:
            work.begin(FILES)
        work.session.user(request)
        work.read("tide.py")
        work.session.write(folder / "projects")
    return root


@contextmanager
def served(folder: Path, *, max_calls: int = 32) -> Iterator[str]:
    """The address of `workspace serve` on this project, in a process of its own."""
    Sandbox()  # where none can be made, it says what to install
    root = record(folder)
    settings = folder / "settings.toml"
    settings.write_text(
        '[workspaces]\nexecute = "commands"\nmax_disk_bytes = 20_000_000\n'
        f"checks = {{ {json.dumps(str(root))} = {json.dumps(CHECK)} }}\n"
        f"repositories = [{json.dumps(str(root))}]\n"
        f"[ingest]\nsources = [{json.dumps(str(folder / 'projects'))}]\n"
    )
    words = ("--max-calls", str(max_calls), "--settings", settings, "--data", folder / "data")
    with serving(*words, cwd=folder) as address:
        yield address


@contextmanager
def serving(*words: str | Path, cwd: Path) -> Iterator[str]:
    """The address of `workspace serve`, in a process of its own."""
    command = [Path(sys.executable).with_name("replay-pipeline"), "workspace", "serve"]
    command += ["--port", "0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=cwd)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate(timeout=30)
