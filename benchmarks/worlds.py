"""How right pairs are said to be, in made-up worlds in which it is known who is right.

    python benchmarks/worlds.py [--seeds 4] [--states 1000] [--world NAME ...] [--json FILE]
    python benchmarks/worlds.py --copier     # what confirming costs and brings where a teacher copies the agent

It holds what is claimed of the pairs of STATES states, everybody asked, against the truth: from votes alone,
against the precision of such pairs over many more states of the world; and with 100 pairs checked, against that
of the very pairs that are left. The product's own estimates and extraction are run; only the answers are made up.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

from replay_pipeline.judge.extract import extract_pairs
from replay_pipeline.judge.precision import draw
from replay_pipeline.replay import parse_gates
from replay_pipeline.replay.buy import buying
from tests.support.gates import bought, numbered
from tests.support.worlds import WORLDS, KindOfState, World, simulate

N_CHECKED = 100
MARK_ALIKE, MARK_CHECKED = 0.03, 0.05
UNALIKE = ("four kinds, half hard", "several right actions", "drift")


def true_precision(world: World, n_states: int = 10_000) -> float:
    """Share of right pairs where everybody is asked, over so many states that chance hardly shows."""
    made = simulate(world, n_states, seed=1_000)
    return statistics.fmean(map(made.is_right_pair, extract_pairs(made.states, made.rows()).pairs))


def claims(world: World, truth: float, n_states: int, seed: int) -> dict[str, float]:
    """True precision, and by how much claims miss it, before and after 100 checks."""
    made = simulate(world, n_states, seed=seed)
    rows = made.rows()
    report = extract_pairs(made.states, rows)
    right = {pair["pair_id"]: made.is_right_pair(pair) for pair in report.pairs}
    chances = draw({pair["pair_id"]: pair["p_better"] for pair in report.pairs}, N_CHECKED)
    checked = {pair_id: right[pair_id] for pair_id in chances}
    after = extract_pairs(made.states, rows, checked=checked, chances=chances)
    left = statistics.fmean(right[pair["pair_id"]] for pair in after.pairs)
    found = after.precision
    return {
        "precision": truth,
        "claimed": report.precision.share,
        "votes_alone": abs(report.precision.share - truth),
        "n_pairs": len(report.pairs),
        "right": statistics.fmean(right.values()),
        "left": left,
        "found": found.share,
        "covered_unchecked": float(report.precision.low <= truth <= report.precision.high),
        "checked": abs(found.share - left),
        "covered": float(found.low <= left <= found.high),
    }


def confirmed(agent: float, copier: int | None, n_states: int, seed: int) -> dict[str, float]:
    """Right positives and dollars by three ways of buying; the cheapest of three teachers may copy the agent."""
    kinds = (KindOfState(tool="Bash", agent=agent, teachers=(0.85, 0.8, 0.8)),)
    made = simulate(World(kinds=kinds, shared=0.5, copier=copier), n_states, seed=seed)
    answers = numbered(made.states, made.teachers, made.rows())
    offer = made.states, made.teachers, answers, parse_gates(("cheap_first:0.1",))
    bought_by = {"everybody": dict.fromkeys(answers, 1.0), "as shipped": bought(*offer)}
    with mock.patch.object(buying, "copies_agent", return_value=False):
        bought_by["one confirms"] = bought(*offer)
    row: dict[str, float] = {}
    for name, chosen in bought_by.items():
        rows = [replace(answers[key], propensity=share) for key, share in chosen.items()]
        found = extract_pairs(made.states, rows).positives
        right = [made.is_right(each["state_id"], each["action_message"]) for each in found]
        row |= {f"{name}: positives": len(found), f"{name}: right": statistics.fmean(right)}
        row[f"{name}: usd"] = sum(each.cost_usd for each in rows)
    return row


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each figure."""
    return {name: round(statistics.fmean(row[name] for row in rows), 4) for name in rows[0]}


def main() -> int:
    """Print the table, and whether the marks are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--states", type=int, default=1_000)
    parser.add_argument("--world", action="append", choices=WORLDS, default=[])
    parser.add_argument("--copier", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.copier:
        for agent in (0.45, 0.6, 0.75, 0.9):
            for copier in (2, None):
                seeds = range(options.seeds)
                row = mean([confirmed(agent, copier, options.states, seed) for seed in seeds])
                print(f"agent {agent}, {'copier' if copier else 'all think'}: {row}", flush=True)
        return 0
    for name in options.world or WORLDS:
        world, seeds = WORLDS[name], range(options.seeds)
        truth = true_precision(world)
        row = mean([claims(world, truth, options.states, seed) for seed in seeds])
        missed = row["checked"] if name in UNALIKE else row["votes_alone"]
        row["is_met"] = missed <= (MARK_CHECKED if name in UNALIKE else MARK_ALIKE)
        found[name] = row
        print(
            f"{name:24s} precision {row['precision']:.3f}, missed by {row['votes_alone']:.3f} from "
            f"votes ({row['covered_unchecked']:.0%} covered), {row['checked']:.3f} with {N_CHECKED} checked "
            f"({row['covered']:.0%} covered): {'ok' if row['is_met'] else 'MISSED'}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0 if all(row["is_met"] for row in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
