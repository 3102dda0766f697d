"""Judge a seeded sample of mutants of the modules that hold money, pairs, splits, secrets and losses.

`make mutants` runs this. The tool is mutmut: a tree of copies holds every mutant of a room, one process
loads the room's tests, and a fork of it runs, for each mutant, the tests that reach the changed function.
"""

import argparse
import configparser
import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCES = ("replay_pipeline", "trainer")
KILLED = {"killed", "timeout", "segfault"}
_NOT_FOUND = 255
SAME = re.compile(r'"(utf-8|select|insert|update|delete|alter|create|bigint)\b[^\']*$')
"""Before what is the same in capitals: the name of an encoding, and SQL without values."""


@dataclass(frozen=True)
class Room:
    """Modules to change, and the tests that must notice."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    selected: tuple[str, ...] = ("-m", "not slow")


MONEY = (
    "money/ledger money/database money/calls money/status money/bills ask/attempts dialects/prices "
    "dialects/usage buy/estimates"
)
MONEY_TESTS = (
    "ledger recovery cost_figures run requests usage odd_replies lies lanes estimates "
    "bills_of_providers"
)
EXTRACTION = "answers claims extract judgment natural records report rule"
ROOMS = {
    "ledger": Room(
        tuple(f"replay_pipeline/replay/{name}.py" for name in MONEY.split()),
        tuple(f"tests/replay_pipeline/replay/test_{name}.py" for name in MONEY_TESTS.split()),
        # Not a minute of random trials, and not what pages say.
        ("-k", "not thousand and not several_processes and not readme"),
    ),
    "extraction": Room(
        tuple(f"replay_pipeline/judge/{name}.py" for name in EXTRACTION.split()),
        ("tests/replay_pipeline/judge",),
    ),
    "splits": Room(
        ("replay_pipeline/publish/splits.py",), ("tests/replay_pipeline/publish/test_splits.py",)
    ),
    "redaction": Room(("replay_pipeline/redaction/*.py",), ("tests/replay_pipeline/redaction",)),
    "losses": Room(("trainer/losses/*.py",), ("tests/trainer/losses",)),
}


def copy_tree(work: Path) -> None:
    """Copy what git knows, so that no run touches the tree it was started in."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, work / name)


def configure(work: Path, room: Room) -> None:
    """Write mutmut's settings into the copy."""
    # On the path from the start: Python remembers of a folder that it was not there.
    (work / "mutants").mkdir()
    beside = [
        path.name for path in sorted(work.iterdir()) if path.name not in {*SOURCES, "mutants"}
    ]
    lists = {
        "source_paths": SOURCES,
        "only_mutate": room.modules,
        "also_copy": beside,
        "pytest_add_cli_args_test_selection": room.tests,
        "pytest_add_cli_args": [*room.selected, "-p", "no:cacheprovider"],
    }
    config = configparser.ConfigParser()
    config["mutmut"] = {key: "\n" + "\n".join(lines) for key, lines in lists.items()} | {
        "process_isolation": "forkserver",
        "timeout_multiplier": "5",
        "timeout_constant": "10",
    }
    with (work / "setup.cfg").open("w") as file:
        config.write(file)


def sample(work: Path, room: Room, *, seed: str, per_module: int) -> list[str]:
    """Name the mutants to judge: as many of each module, by chance."""
    chosen = []
    with contextlib.chdir(work):  # mutmut reads its settings from where it is imported
        from mutmut.configuration import reset_config
        from mutmut.mutation.file_mutation import mutate_file_contents
        from mutmut.utils.format_utils import get_mutant_name

        reset_config()
        for path in sorted(path for pattern in room.modules for path in Path().glob(pattern)):
            mutated = mutate_file_contents(str(path), path.read_text())
            names = [get_mutant_name(path, name) for name in mutated.mutant_names]
            order = random.Random(f"{seed} {path}")
            chosen += order.sample(names, min(per_module, len(names)))
    return chosen


def mutmut(work: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Call mutmut in the copy; what the tests start as processes loads the copy too."""
    environment = os.environ | {"PYTHONPATH": str(work / "mutants")}
    command = [Path(sys.executable).with_name("mutmut"), *arguments]
    return subprocess.run(command, cwd=work, env=environment, text=True, **options)


def judge(work: Path, names: list[str]) -> dict[str, str]:
    """Run the tests on each mutant: its name and what became of it.

    Raises:
        SystemExit: the tests fail before anything is changed.
    """
    if mutmut(work, "run", "--max-children", "1", *names).returncode:
        raise SystemExit("mutmut could not run: see above")
    listed = mutmut(work, "results", "--all", "true", check=True, capture_output=True).stdout
    fates = dict(line.strip().rsplit(": ", 1) for line in listed.splitlines())
    fates |= dict.fromkeys(without_tests(work), "not judged")
    return {name: fates.get(name, "not checked") for name in names}


def without_tests(work: Path) -> set[str]:
    """Name the mutants whose tests pytest did not find, which mutmut counts as too slow."""
    files = [json.loads(path.read_text()) for path in (work / "mutants").rglob("*.meta")]
    codes = {name: code for file in files for name, code in file["exit_code_by_key"].items()}
    return {name for name, code in codes.items() if code == _NOT_FOUND}


def place(work: Path, diff: str) -> str:
    """Return the file and the line that a diff of one function changes."""
    path = next(line[4:] for line in diff.splitlines() if line.startswith("--- "))
    gone = next(line[1:] for line in diff.splitlines()[2:] if line.startswith("-"))
    source = (work / path).read_text().splitlines()
    lines = [number for number, line in enumerate(source, 1) if line.strip() == gone.strip()]
    return f"{path}:{','.join(map(str, lines)) or '?'}"


def is_equivalent(diff: str) -> bool:
    """Return whether a mutant is the program as it was, written in capitals."""
    lines = diff.splitlines()[2:]
    gone, come = ([line[1:] for line in lines if line[:1] == sign] for sign in "-+")
    return [line.lower() for line in gone] == [line.lower() for line in come] and all(
        SAME.search(line) for line in gone
    )


def run_room(name: str, work: Path, *, seed: str, per_module: int) -> Counter[str]:
    """Judge a room's sample, print who survived, and count what became of all."""
    room = ROOMS[name]
    copy_tree(work)
    configure(work, room)
    fates = judge(work, sample(work, room, seed=seed, per_module=per_module))
    for mutant, fate in list(fates.items()):
        if fate not in KILLED:
            shown = mutmut(work, "show", mutant, check=True, capture_output=True).stdout
            diff = shown.split("\n", 1)[1]
            if is_equivalent(diff):
                fates[mutant] = "equivalent"
                continue
            print(f"\n{place(work, diff)} {fate}: {mutant}\n{diff}", flush=True)
    return Counter(fates.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*", choices=[*ROOMS, []], help="all of them by default")
    parser.add_argument("--per-module", type=int, default=10)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--least", type=float, default=0.95, help="share that must be killed")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "mutants")
    options = parser.parse_args()
    scores = {}
    for name in options.rooms or ROOMS:
        work = (options.work / name).resolve()
        scores[name] = run_room(name, work, seed=options.seed, per_module=options.per_module)
    scores["all"] = sum(scores.values(), Counter())
    for name, fates in scores.items():
        killed = sum(fates[fate] for fate in KILLED)
        others = ", ".join(f"{n} {fate}" for fate, n in sorted(fates.items()) if fate not in KILLED)
        n_judged = fates.total() - fates["equivalent"]
        share = killed / n_judged
        print(f"{name}: {killed} of {n_judged} killed, {share:.1%}" + f" ({others})" * bool(others))
    if share < options.least:
        print(f"fewer than {options.least:.0%} were killed")
    return int(share < options.least)


if __name__ == "__main__":
    sys.exit(main())
