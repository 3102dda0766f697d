"""How right pairs are, and what a dollar brings, in made-up worlds in which it is known who is right.

    python benchmarks/worlds.py [--seeds 4] [--states 1000] [--world NAME ...] [--keep FOLDER] [--json FILE]

The first line of a world holds what is claimed of the pairs of STATES states, everybody asked, against the truth: from
votes alone, against the precision of such pairs over many more states of the world; and with 100 pairs
checked, against that of the very pairs that are left. The second compares what the money for STATES states, everybody
asked in order, brings with what it brings bought by value, out of six times as many states. The product's
own estimates, buyer and extraction are run; only the answers are made up, and no server is between: that it
buys the same over the wire is `tests/replay_pipeline/replay/test_buying.py`. With `--keep`, each world
and seed has a file of its own, and a run that was stopped goes on.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from replay_pipeline.pairs import extract_pairs
from replay_pipeline.reliability import draw
from tests.support.worlds import WORLDS, World, bought, simulate

N_CHECKED = 100
MARK_ALIKE, MARK_CHECKED = 0.03, 0.05
MARK_MIXED, MARK_LEAST, MARK_PRECISION = 2.0, 0.95, 0.01
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


def money(world: World, n_states: int, seed: int) -> dict[str, float]:
    """Right pairs and precision of both ways to spend the same."""
    made = simulate(world, 6 * n_states, seed=seed)
    usd = n_states * sum(world.prices) / 1_000
    found: dict[str, float] = {}
    for name, rows in (("all", made.rows(made.states[:n_states])), ("value", bought(made, usd))):
        pairs = extract_pairs(made.states, rows).pairs
        right = sum(map(made.is_right_pair, pairs))
        found |= {f"right_{name}": right, f"precision_{name}": right / max(1, len(pairs))}
    return found


def measured(
    name: str, truth: dict[str, float], n_states: int, seed: int, keep: Path | None
) -> dict[str, float]:
    """Figures of one world and seed, from their file where it is there."""
    file = None if keep is None else keep / f"{name.replace(' ', '_')}-{n_states}-{seed}.json"
    if file is not None and file.exists():
        return json.loads(file.read_text("utf-8"))
    if name not in truth:
        truth[name] = true_precision(WORLDS[name])
    row = claims(WORLDS[name], truth[name], n_states, seed) | money(WORLDS[name], n_states, seed)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".part").write_text(json.dumps(row, indent=1) + "\n", "utf-8")
        file.with_suffix(".part").replace(file)
    return row


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each figure."""
    return {name: round(statistics.fmean(row[name] for row in rows), 4) for name in rows[0]}


def main() -> int:
    """Print both tables, and whether the marks are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--states", type=int, default=1_000)
    parser.add_argument("--world", action="append", choices=WORLDS, default=[])
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    truth: dict[str, float] = {}
    for name in options.world or WORLDS:
        seeds = range(options.seeds)
        row = mean([measured(name, truth, options.states, seed, options.keep) for seed in seeds])
        missed = row["checked"] if name in UNALIKE else row["votes_alone"]
        mark = MARK_CHECKED if name in UNALIKE else MARK_ALIKE
        gain = row["right_value"] / row["right_all"]
        lost = row["precision_all"] - row["precision_value"]
        row["is_met"] = (
            missed <= mark
            and gain >= (MARK_MIXED if name == "four kinds" else MARK_LEAST)
            and lost <= MARK_PRECISION
        )
        found[name] = row
        print(
            f"{name:24s} precision {row['precision']:.3f}, missed by {row['votes_alone']:.3f} from "
            f"votes ({row['covered_unchecked']:.0%} covered), {row['checked']:.3f} with {N_CHECKED} checked ({row['covered']:.0%} covered)\n"
            f"{'':24s} everybody {row['right_all']:.0f} right ({row['precision_all']:.3f}), by value "
            f"{row['right_value']:.0f} ({row['precision_value']:.3f}), {gain:.2f} times: "
            f"{'ok' if row['is_met'] else 'MISSED'}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0 if all(row["is_met"] for row in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
