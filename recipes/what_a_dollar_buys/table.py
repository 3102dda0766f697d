"""The table and the picture of what was measured, with intervals, and the check that controls must fail."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

N_BOOT = 4000
CONTROLS = ("coin, pairs", "foreign prompts, pairs", "frozen, pairs")
LEAST_DIFFERENCE = 0.1
"""By how much the chosen sides must be right more often than the rejected ones."""


def intervals(
    arms: Mapping[str, np.ndarray], families: Sequence[str], seed: int = 0
) -> dict[str, np.ndarray]:
    """Draw families with all their tasks, and seeds, with replacement; give each arm's executed success.

    Args:
        arms: executed or not, by seed and task [S, N].
        families: of each task [N].
        seed: of the draws, which all arms share.

    Returns:
        A success rate of each draw, by arm [N_BOOT].
    """
    draw, names = np.random.default_rng(seed), sorted(set(families))
    member_NF = np.array([[name == family for name in names] for family in families], dtype=float)
    counts_BF = draw.multinomial(len(names), np.full(len(names), 1 / len(names)), size=N_BOOT)
    weights_BN = counts_BF @ member_NF.T
    weights_BN /= weights_BN.sum(1, keepdims=True)
    drawn = {}
    for name, done_SN in arms.items():
        seeds_BS = draw.multinomial(
            len(done_SN), np.full(len(done_SN), 1 / len(done_SN)), size=N_BOOT
        )
        drawn[name] = ((seeds_BS / len(done_SN)) @ done_SN * weights_BN).sum(1)
    return drawn


def named(drawn: Mapping[str, np.ndarray], agrees: Mapping[str, bool]) -> np.ndarray:
    """Return best arm of agreement minus best other arm in each draw; which is best, each draw decides."""
    best = [
        np.max([drawn[n] for n in drawn if agrees[n] is side], axis=0) for side in (True, False)
    ]
    return best[0] - best[1]


def p_value(difference: np.ndarray) -> float:
    """Return the two-sided bootstrap p of a difference."""
    tails = ((difference <= 0).sum(), (difference >= 0).sum())
    return min(2 * (min(tails) + 1) / (len(difference) + 1), 1.0)


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Correct p-values for their number (Holm 1979)."""
    worst, corrected = 0.0, {}
    for rank, name in enumerate(sorted(p, key=p.__getitem__)):
        worst = max(worst, min(p[name] * (len(p) - rank), 1.0))
        corrected[name] = worst
    return corrected


def check(bought: Mapping[str, Any], gain: np.ndarray | None) -> list[str]:
    """Say what is wrong with an arm: its labels tell nothing, or it does not act better than before."""
    if not bought["n_pairs"]:
        return ["there is no pair"]
    found = []
    if bought["chosen_right"] - bought["rejected_right"] < LEAST_DIFFERENCE:
        found.append("the chosen sides are right no more often than the rejected ones")
    if gain is None or np.quantile(gain, 0.025) <= 0:
        found.append("it does not act better than the untrained model")
    return found


def summary(
    results: Mapping[str, Sequence[Mapping[str, Any]]], agrees: Mapping[str, bool]
) -> dict[str, Any]:
    """Put the results of one regime into figures.

    Args:
        results: of each arm, what was kept of each seed.
        agrees: whether an arm is one of agreement.
    """
    tasks = [row[:3] for row in results["nothing"][0]["outcomes"]]
    rates = {n: np.array([[row[3] == "right" for row in r["outcomes"]] for r in of], dtype=float)
             for n, of in results.items() if of[0]["outcomes"]}  # fmt: skip
    drawn = intervals(rates, [family for _, family, _ in tasks])
    is_new = np.array([split == "new_families" for _, _, split in tasks])
    rows = {}
    for name, of in results.items():
        gain = drawn[name] - drawn["nothing"] if name in drawn and name != "nothing" else None
        report, bought = of[0].get("report") or {}, of[0].get("bought") or {}
        rows[name] = {"seeds": len(of), "bought": bought, "cpu_s": [r["cpu_s"] for r in of]}
        if name in rates:
            calls = [row[3] in ("right", "wrong") for r in of for row in r["outcomes"]]
            ranks = [row[4] for r in of for row in r["outcomes"]]
            rows[name] |= {
                "executed": rates[name].mean(), "interval": np.quantile(drawn[name], [0.025, 0.975]).tolist(),
                "by_seed": rates[name].mean(1).tolist(), "new_families": rates[name][:, is_new].mean(),
                "possible_calls": float(np.mean(calls)), "pair_accuracy": float(np.mean(ranks)),
                "general_loss": [report.get("general_loss_before"), report.get("general_loss_after")],
            }  # fmt: skip
        if bought:
            rows[name]["check"] = check(bought, gain)
    real = {n: d for n, d in drawn.items() if n not in CONTROLS}
    # Arms are named only by all seeds: the best of many arms of one seed is so by luck.
    n_seeds = max(len(results[n]) for n in real)
    whole = {n: d for n, d in real.items() if n == "nothing" or len(results[n]) == n_seeds}
    sides = {agrees[n] for n in whole}
    others = {
        f"{n} - nothing": p_value(d - drawn["nothing"]) for n, d in drawn.items() if n != "nothing"
    }
    others |= {f"{a} - {b}": p_value(drawn[a] - drawn[b]) for a in real for b in real
               if agrees[a] and not agrees[b] and b != "nothing"}  # fmt: skip
    found: dict[str, Any] = {"tasks": len(tasks), "arms": rows, "corrected_p": holm(others)}
    if sides == {True, False}:
        difference = named(whole, agrees)
        best = [
            max((n for n in whole if agrees[n] is side), key=lambda n: rates[n].mean())
            for side in (True, False)
        ]
        found["named"] = {
            "best_of_agreement": best[0], "best_other": best[1],
            "difference": rates[best[0]].mean() - rates[best[1]].mean(),
            "interval": np.quantile(difference, [0.025, 0.975]).tolist(), "p": p_value(difference),
        }  # fmt: skip
    return found


def write(folder: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Write `table.json` and `picture.svg` of what there is in a folder; give the table."""
    agrees = {arm["name"]: arm.get("agrees", False) for arm in plan["arms"]}
    results: dict[str, dict[str, list[Any]]] = {}
    for path in sorted((folder / "arms").glob("*.json")):
        regime, _, rest = path.stem.partition(", ")
        if (name := rest.rpartition(", ")[0]) not in agrees:
            continue  # of another version of arms.toml
        known = json.loads(path.read_text("utf-8"))
        results.setdefault(regime, {}).setdefault(name, []).append(
            known["value"] | {"cpu_s": known["cpu_s"]}
        )
    mapped = {
        p.parent.name: json.loads(p.read_text("utf-8"))
        for p in sorted((folder / "map").glob("*/worth.json"))
    }
    agent = folder / "sessions.json"
    table = {
        "run": json.loads((folder / "run.json").read_text("utf-8")),
        "agent": json.loads(agent.read_text("utf-8"))["value"] if agent.exists() else None,
        "regimes": {
            name: summary(results[name], agrees)
            for name in plan["regimes"]
            if "nothing" in results.get(name, {})
        },
        "map": {name: known["value"] | {"cpu_s": known["cpu_s"]} for name, known in mapped.items()},
    }
    (folder / "table.json").write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    draw(table, folder / "picture.svg")
    return table


def draw(table: Mapping[str, Any], path: Path) -> None:
    """Draw executed success by arm with its interval, and right pairs by dollars, for each regime."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "dollar", "svg.fonttype": "none", "font.size": 9})
    lines: dict[str, dict[str, list[tuple[float, int]]]] = {}
    for name, value in table["map"].items():
        regime, purchase, _ = name.split(", ")
        lines.setdefault(regime, {}).setdefault(purchase, []).append(
            (value["usd"], value["n_right_pairs"])
        )
    # With one budget there is no line to draw; the table has the points.
    mapped = [r for r, of in lines.items() if any(len(points) > 1 for points in of.values())]
    panels = {
        regime: sorted(
            ((name, row) for name, row in of["arms"].items() if "executed" in row),
            key=lambda one: one[1]["executed"],
        )
        for regime, of in table["regimes"].items()
    }
    heights = [0.9 + 0.22 * len(rows) for rows in panels.values()] + [2.8] * bool(mapped)
    if not heights:
        heights = [1.0]  # nothing has run: an empty picture
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    parts = iter(np.atleast_1d(figure.subfigures(len(heights), 1, height_ratios=heights)))
    for (regime, rows), part in zip(panels.items(), parts, strict=False):
        axes = part.subplots()
        for place, (_, row) in enumerate(rows):
            axes.plot(row["interval"], [place, place], color="#888")
            axes.plot([row["executed"]], [place], "o", color="#4063d8")
        axes.set_yticks(range(len(rows)), [_label(name, row) for name, row in rows])
        axes.set_xlim(0, 1)
        axes.set_ylim(-0.6, len(rows) - 0.4)
        n_tasks = table["regimes"][regime]["tasks"]
        axes.set_title(f"Right actions at {n_tasks} held-out repositories, teachers: {regime}")
    if mapped:
        below = next(parts)
        for axes, regime in zip(
            below.subplots(1, len(mapped), squeeze=False, sharey=True)[0], mapped, strict=True
        ):
            for purchase, points in lines[regime].items():
                axes.plot(*zip(*sorted(points), strict=True), "o-", ms=3, label=purchase)
            axes.set(title=regime, xlabel="dollars")
            axes.set_ylim(bottom=0)
        below.axes[0].set_ylabel("right pairs")
        below.axes[0].legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def _label(name: str, row: Mapping[str, Any]) -> str:
    usd, n = row["bought"].get("usd", 0), row["seeds"]
    return f"{name} (${usd:.3f}" + (f", {n} seed{'s' * (n > 1)})" if name != "nothing" else ")")
