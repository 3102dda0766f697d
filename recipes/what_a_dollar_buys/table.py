"""The table and the picture of what was measured, with intervals, and the check that controls must fail."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

N_BOOT = 4000
CONTROLS = ("coin, pairs", "foreign prompts, pairs", "frozen, pairs")


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
    random, names = np.random.default_rng(seed), sorted(set(families))
    member_NF = np.array([[name == family for name in names] for family in families], dtype=float)
    counts_BF = random.multinomial(len(names), np.full(len(names), 1 / len(names)), size=N_BOOT)
    weights_BN = counts_BF @ member_NF.T
    weights_BN /= weights_BN.sum(1, keepdims=True)
    drawn = {}
    for name, done_SN in arms.items():
        n = len(done_SN)
        seeds_BS = random.multinomial(n, np.full(n, 1 / n), size=N_BOOT)
        drawn[name] = ((seeds_BS / n) @ done_SN * weights_BN).sum(1)
    return drawn


def p_value(difference: np.ndarray) -> float:
    """Return the two-sided bootstrap p of a difference."""
    n_least = min((difference <= 0).sum(), (difference >= 0).sum())
    return min(2 * (n_least + 1) / (len(difference) + 1), 1.0)


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Correct p-values for their number (Holm 1979)."""
    worst, corrected = 0.0, {}
    for rank, name in enumerate(sorted(p, key=p.__getitem__)):
        corrected[name] = worst = max(worst, min(p[name] * (len(p) - rank), 1.0))
    return corrected


def check(bought: Mapping[str, Any], gain: np.ndarray | None) -> list[str]:
    """Say what is wrong with an arm.

    Its labels tell nothing, if chosen sides aren't right by .1 more often than rejected ones, or it
    does not act better than before.
    """
    if not bought["n_pairs"]:
        return ["there is no pair"]
    found = []
    if bought["chosen_right"] - bought["rejected_right"] < 0.1:
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
    _, families, splits, *_ = zip(*results["nothing"][0]["outcomes"], strict=True)
    rates = {n: np.array([[row[3] == "right" for row in r["outcomes"]] for r in of], dtype=float)
             for n, of in results.items() if of[0]["outcomes"]}  # fmt: skip
    drawn, is_new = intervals(rates, families), np.array(splits) == "new_families"
    gains = {name: d - drawn["nothing"] for name, d in drawn.items() if name != "nothing"}
    rows = {}
    for name, of in results.items():
        report, bought = of[0].get("report") or {}, of[0].get("bought") or {}
        rows[name] = {"seeds": len(of), "bought": bought, "cpu_s": [r["cpu_s"] for r in of]}
        if name in rates:
            seen = [row for r in of for row in r["outcomes"]]
            rows[name] |= {
                "executed": rates[name].mean(), "interval": np.quantile(drawn[name], [0.025, 0.975]).tolist(),
                "by_seed": rates[name].mean(1).tolist(), "new_families": rates[name][:, is_new].mean(),
                "possible_calls": float(np.mean([row[3] in ("right", "wrong") for row in seen])),
                "pair_accuracy": float(np.mean([row[4] for row in seen])),
                "general_loss": [report.get(f"general_loss_{when}") for when in ("before", "after")],
            }  # fmt: skip
        if bought:
            rows[name]["check"] = check(bought, gains.get(name))
    real = [name for name in drawn if name not in CONTROLS]
    others = {f"{name} - nothing": p_value(gain) for name, gain in gains.items()}
    others |= {f"{a} - {b}": p_value(drawn[a] - drawn[b]) for a in real for b in real
               if agrees[a] and not agrees[b] and b != "nothing"}  # fmt: skip
    found = {"tasks": len(families), "arms": rows, "corrected_p": holm(others)}
    # Arms are named only by all seeds: the best of many arms of one seed is so by luck.
    n_seeds = max(len(results[name]) for name in real)
    whole = [name for name in real if name == "nothing" or len(results[name]) == n_seeds]
    sides = [[name for name in whole if agrees[name] is side] for side in (True, False)]
    if all(sides):
        # Which arm is best, each draw decides.
        ours, theirs = (np.max([drawn[name] for name in side], axis=0) for side in sides)
        best, other = (max(side, key=lambda name: rates[name].mean()) for side in sides)
        found["named"] = {
            "best_of_agreement": best, "best_other": other,
            "difference": rates[best].mean() - rates[other].mean(),
            "interval": np.quantile(ours - theirs, [0.025, 0.975]).tolist(), "p": p_value(ours - theirs),
        }  # fmt: skip
    return found


def write(folder: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Write `table.json` and `picture.svg` of what there is in a folder; give the table."""

    def kept(path: Path) -> dict[str, Any]:
        known = json.loads(path.read_text("utf-8"))
        return known["value"] | {"cpu_s": known["cpu_s"]}

    agrees = {arm["name"]: arm.get("agrees", False) for arm in plan["arms"]}
    results: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((folder / "arms").glob("*.json")):
        regime, _, rest = path.stem.partition(", ")
        if (name := rest.rpartition(", ")[0]) in agrees:  # or of another version of arms.toml
            results[regime][name].append(kept(path))
    agent = folder / "sessions.json"
    table = {
        "run": json.loads((folder / "run.json").read_text("utf-8")),
        "agent": json.loads(agent.read_text("utf-8"))["value"] if agent.exists() else None,
        "regimes": {
            n: summary(results[n], agrees) for n in plan["regimes"] if "nothing" in results[n]
        },
        "bought": {
            p.parent.name: kept(p) for p in sorted((folder / "bought").glob("*/worth.json"))
        },
    }
    (folder / "table.json").write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    draw(table, folder / "picture.svg")
    return table


def draw(table: Mapping[str, Any], path: Path) -> None:
    """Draw executed success by arm with its interval, and right pairs by dollars, for each regime."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "dollar", "svg.fonttype": "none", "font.size": 9})
    lines: Any = defaultdict(lambda: defaultdict(list))
    for name, value in table["bought"].items():
        regime, purchase, _ = name.split(", ")
        lines[regime][purchase].append((value["usd"], value["n_right_pairs"]))
    # With one budget there is no line to draw; the table has the points.
    mapped = [r for r, of in lines.items() if any(len(points) > 1 for points in of.values())]
    panels = {regime: sorted((row["executed"], name) for name, row in of["arms"].items()
                             if "executed" in row) for regime, of in table["regimes"].items()}  # fmt: skip
    heights = [0.9 + 0.22 * len(rows) for rows in panels.values()] + [2.8] * bool(mapped)
    places = [[regime] * max(len(mapped), 1) for regime in panels]
    places += [[f"bought, {regime}" for regime in mapped]] if mapped else []
    figure = Figure(figsize=(9, sum(heights) or 1), layout="constrained")
    axes: Any = figure.subplot_mosaic(places, height_ratios=heights) if places else {}
    for regime, rows in panels.items():
        arms, labels = table["regimes"][regime]["arms"], []
        for place, (rate, name) in enumerate(rows):
            axes[regime].plot(arms[name]["interval"], [place, place], color="#888")
            axes[regime].plot([rate], [place], "o", color="#4063d8")
            usd, n = arms[name]["bought"].get("usd", 0), arms[name]["seeds"]
            labels.append(f"{name} (${usd:.3f}, seeds: {n})")
        axes[regime].set_yticks(range(len(rows)), labels)
        title = f"Right at {table['regimes'][regime]['tasks']} held-out repositories, teachers: {regime}"
        axes[regime].set(xlim=(0, 1), ylim=(-0.6, len(rows) - 0.4), title=title)
    most = max((y for r in mapped for of in lines[r].values() for _, y in of), default=0)
    for regime in mapped:
        below = axes[f"bought, {regime}"]
        for purchase, points in lines[regime].items():
            below.plot(*zip(*sorted(points), strict=True), "o-", ms=3, label=purchase)
        below.set(title=regime, xlabel="dollars", ylabel="right pairs", ylim=(0, 1.05 * most))
        below.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def report(table: Mapping[str, Any]) -> int:
    """Print the table; 1 if a control passed the check that it must fail."""
    n_passed = 0
    for regime, of in table["regimes"].items():
        for name, row in of["arms"].items():
            right = f"{row.get('executed', 0):.3f} {row.get('interval', '')}"
            print(f"{regime:20} {name:28} {right} {'; '.join(row.get('check', [])) or 'passes'}")
            n_passed += name in CONTROLS and not row["check"]
        print(json.dumps(of.get("named")))
    return int(n_passed > 0)
