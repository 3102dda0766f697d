"""The command; see the package's docstring."""

import argparse
import json
import random
import re
import sys
from collections import Counter
from typing import Any

from tests.twins.generate import Command, groups_of_twins, installed, tables
from tests.twins.samples import NOT_RUN, SAMPLES, Sample
from tests.twins.sandbox import (
    Observation,
    Sandbox,
    is_isolated,
    opened,
    run_isolated,
    without_spelling,
)

N_BASES = 6
"""Commands that are spelled in several ways before twins are sought among them all."""
N_PER_ROUND = 16
"""Most twins of one program before the next one has its turn."""


def run_twins(count: int, seed: int, only: list[str] | None = None) -> dict[str, Any]:
    """Execute about `count` twins, spread evenly over the programs that are there.

    Args:
        count: Pairs of commands to run.
        seed: Equal seeds give equal twins on machines with equal tools.
        only: Titles of tables, all by default.

    Returns:
        The report, JSON-ready: figures, and what differed.
    """
    draw = random.Random(seed)
    there, missing = _programs_there()
    if only is not None:
        there = [title for title in there if title in only]
    counted: Counter[str] = Counter()
    succeeded: Counter[str] = Counter()
    unstable: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    per_round = min(N_PER_ROUND, 1 + count // len(there))
    with opened() as sandbox:
        round_began_at = -1
        while round_began_at < sum(counted.values()) < count:
            round_began_at = sum(counted.values())
            for title in there:
                groups = list(groups_of_twins(draw, title, str(sandbox.work), N_BASES))
                draw.shuffle(groups)
                left = per_round
                for group in groups:
                    if left > 0:
                        left -= len(group) - 1
                        counted[title] += len(group) - 1
                        _compare(sandbox, title, group, succeeded, unstable, wrong)
    return {
        "twins": sum(counted.values()),
        "programs": len(+counted),
        "twins_that_succeed": sum(succeeded.values()),
        "unstable_by_program": dict(unstable),
        "not_there": missing,
        "is_isolated": is_isolated(),
        "false_merges": wrong,
    }


def _programs_there() -> tuple[list[str], list[str]]:
    there, missing = [], []
    for title, names in tables().items():
        if title in NOT_RUN:
            continue
        is_there = bool(installed(names, SAMPLES.get(title, Sample())))
        (there if is_there else missing).append(title)
    return there, missing


def _compare(
    sandbox: Sandbox,
    title: str,
    group: list[Command],
    succeeded: Counter[str],
    unstable: Counter[str],
    wrong: list[dict[str, Any]],
) -> None:
    sample = SAMPLES.get(title, Sample())

    def observe(command: Command) -> Observation:
        return sandbox.observe(command.text, kind=sample.kind, stdin=sample.stdin)

    echoes = re.compile(sample.echoes)
    first, *others = group
    expected = observe(first)
    for other in others:
        found = observe(other)
        succeeded[title] += found.status == 0
        if _are_same(first, expected, other, found, echoes):
            continue
        again = [(observe(first), observe(other)) for _ in range(2)]
        if any(
            _what_counts(one, echoes) != _what_counts(expected, echoes)
            or _what_counts(two, echoes) != _what_counts(found, echoes)
            for one, two in again
        ):
            unstable[title] += 1
            continue
        wrong.append(
            {
                "program": title,
                "commands": [first.text, other.text],
                "did": [_shown(expected), _shown(found)],
            }
        )


def _are_same(
    a: Command, found_a: Observation, b: Command, found_b: Observation, echoes: re.Pattern[str]
) -> bool:
    is_respelt = a.is_respelt or b.is_respelt
    found_a, found_b = (_what_counts(found, echoes) for found in (found_a, found_b))
    if found_a == found_b:
        return True
    return is_respelt and without_spelling(found_a) == without_spelling(found_b)


def _what_counts(found: Observation, echoes: re.Pattern[str]) -> Observation:
    """Leave out what repeats the command's spelling: echoes, and the words of a refusal."""
    printed, complained = (
        "\n".join(line for line in text.split("\n") if not echoes.match(line))
        for text in (found.printed, "" if found.status else found.complained)
    )
    return found._replace(printed=printed, complained=complained)


def _shown(found: Observation) -> dict[str, Any]:
    return {
        "status": found.status,
        "printed": found.printed[:400],
        "complained": found.complained[:400],
        "tree": found.tree[-2_000:],
    }


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.twins", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    status = run_isolated([sys.executable, "-m", "tests.twins", *sys.argv[1:]])
    if status is not None:
        return status
    report = run_twins(options.count, options.seed)
    print(json.dumps(report, indent=1))
    return 1 if report["false_merges"] else 0


if __name__ == "__main__":
    sys.exit(main())
