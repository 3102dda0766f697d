"""The tables and the picture of what was measured, with intervals, and the checks on both.

    python recipes/what_a_dollar_buys/table.py build/dollar [--publish]

writes `table.json` and `picture.svg` again from what is in the folder. With `--publish`, it puts both
beside this file, and the headline and the tables into the recipe's and the repository's README.
"""

import hashlib
import json
import sys
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
REGISTERED = HERE / "preregistration.toml"
ARMS = HERE / "arms.toml"
N_BOOT = 4000
NAMED = ("as shipped", "one teacher")
REGIME: str = tomllib.loads(REGISTERED.read_text("utf-8"))["regime"]
"""The teachers of the named comparison."""


def intervals(
    arms: Mapping[str, np.ndarray], kinds: Sequence[str], seed: int = 0
) -> dict[str, np.ndarray]:
    """Draw kinds of tasks with all their tasks, and seeds, with replacement; give each arm's executed success.

    Args:
        arms: executed or not, by seed and task [S, N].
        kinds: of each task [N].
        seed: of the draws, which all arms share.

    Returns:
        A success rate of each draw, by arm [N_BOOT].
    """
    random, names = np.random.default_rng(seed), sorted(set(kinds))
    member_NF = np.array([[name == kind for name in names] for kind in kinds], dtype=float)
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


def check(row: Mapping[str, Any], gain: np.ndarray | None) -> list[str]:
    """Say what is wrong with an arm.

    Its lessons tell nothing, if they aren't right by .05 more often than what the agent itself did
    there, or it does not act better than the untrained model.
    """
    found = []
    if not row["n_lessons"]:
        found.append("there is no lesson")
    elif row["right"] - row["agent_right"] < 0.05:
        found.append("the lessons are right no more often than the agent")
    if gain is None or np.quantile(gain, 0.025) <= 0:
        found.append("it does not act better than the untrained model")
    return found


def compared(ours: np.ndarray, theirs: np.ndarray, rates: tuple[float, float]) -> dict[str, Any]:
    """Return the difference of two arms, its 95 % interval, and its p."""
    difference = ours - theirs
    return {
        "difference": float(rates[0] - rates[1]),
        "interval": np.quantile(difference, [0.025, 0.975]).tolist(),
        "p": p_value(difference),
    }


def summary(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Put the results of one regime, with the same epochs or steps, into figures.

    Args:
        results: of each arm, what was kept of each seed.
    """
    _, families, kinds, splits, *_ = zip(*results["nothing"][0]["outcomes"], strict=True)
    rates = {n: np.array([[row[4] == "right" for row in r["outcomes"]] for r in of], dtype=float)
             for n, of in results.items()}  # fmt: skip
    drawn, is_new = intervals(rates, kinds), np.array(splits) == "new_words"
    rows: dict[str, Any] = {}
    for name, of in results.items():
        keys = ("steps", "n_calls", "usd", "n_lessons", "right", "agent_right")
        rows[name] = {key: of[0].get(key) for key in keys} | {
            "seeds": len(of),
            "executed": rates[name].mean(),
            "interval": np.quantile(drawn[name], [0.025, 0.975]).tolist(),
            "by_seed": rates[name].mean(1).tolist(),
            "new_words": rates[name][:, is_new].mean(),
            "by_family": {
                family: rates[name][:, np.array(families) == family].mean()
                for family in sorted(set(families))
            },
            "cpu_s": [r["cpu_s"] for r in of],
        }
        if name != "nothing":
            rows[name]["check"] = check(rows[name], drawn[name] - drawn["nothing"])
    found: dict[str, Any] = {"tasks": len(kinds), "arms": rows}
    if all(name in rates for name in NAMED):
        ours, theirs = NAMED
        means = (rates[ours].mean(), rates[theirs].mean())
        found["named"] = compared(drawn[ours], drawn[theirs], means)
    others = {f"{name} - {base}": p_value(drawn[name] - drawn[base])
              for base in ("nothing", "one teacher") if base in rates
              for name in rates if name not in ("nothing", base) and (name, base) != NAMED}  # fmt: skip
    return found | {"corrected_p": holm(others)}


def is_same_by_steps(arm: Mapping[str, Any]) -> bool:
    """Return whether an arm of `arms.toml` sees the same by epochs and by steps.

    It trains nothing, or it has as many answers as one teacher, by whose epochs all steps are counted.
    """
    has_as_many = arm.get("lessons") == "answers" and "rounds" not in arm
    return arm.get("settings") in (None, "frozen") or (has_as_many and len(arm["teachers"]) == 1)


def registered(run: Mapping[str, Any]) -> dict[str, Any]:
    """Compare what runs with `preregistration.toml`: the draw, the size, and the files' digests."""
    plan = tomllib.loads(REGISTERED.read_text("utf-8"))
    changed = [name for name, digest in plan["digests"].items() if digest_of(name) != digest]
    return {
        "is_this_draw": (run["draw"], run["size"]) == (plan["draw"], plan["size"]),
        "regime": plan["regime"],
        "seeds": plan["seeds"],
        "changed_since": changed,
    }


def digest_of(name: str) -> str:
    """Return the first 16 digits of the SHA-256 of a file of the recipe."""
    return hashlib.sha256((HERE / name).read_bytes()).hexdigest()[:16]


def write(folder: Path) -> dict[str, Any]:
    """Write `table.json` and `picture.svg` of what there is in a folder; give the table."""
    results: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    arms = {arm["name"]: arm for arm in tomllib.loads(ARMS.read_text("utf-8"))["arms"]}
    for path in sorted((folder / "arms").glob("*.json")):
        (regime, _, rest), known = path.stem.partition(", "), json.loads(path.read_text("utf-8"))
        (rest, by, _), kept = rest.rsplit(", ", 2), known["value"] | {"cpu_s": known["cpu_s"]}
        results[regime][by][rest].append(kept)
        if by == "epochs" and is_same_by_steps(arms[rest]):
            results[regime]["steps"][rest].append(kept)
    run = json.loads((folder / "run.json").read_text("utf-8"))
    table = {
        "run": run,
        "preregistered": registered(run),
        "regimes": {
            regime: {by: summary(arms) for by, arms in of.items() if "nothing" in arms}
            for regime, of in results.items()
        },
    }
    (folder / "table.json").write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    draw(table, folder / "picture.svg")
    return table


def draw(table: Mapping[str, Any], path: Path) -> None:
    """Draw executed success by arm with its interval, of the arms with the same epochs, by regime."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "dollar", "svg.fonttype": "none", "font.size": 9})
    panels = {regime: of["epochs"] for regime, of in table["regimes"].items() if "epochs" in of}
    heights = [0.9 + 0.24 * len(of["arms"]) for of in panels.values()]
    figure = Figure(figsize=(7.5, sum(heights) or 1), layout="constrained")
    axes: Any = figure.subplots(len(panels) or 1, 1, squeeze=False, height_ratios=heights or [1])
    for (regime, of), (axis,) in zip(panels.items(), axes, strict=False):
        arms = sorted(of["arms"].items(), key=lambda arm: arm[1]["executed"])
        for place, (name, row) in enumerate(arms):
            color = "#d8402f" if name in NAMED else "#4063d8"
            axis.plot(row["interval"], [place, place], color="#888")
            axis.plot([row["executed"]], [place], "o", color=color)
        labels = [f"{name} (seeds: {row['seeds']})" for name, row in arms]
        axis.set_yticks(range(len(arms)), labels)
        title = f"Right at {of['tasks']} held-out tasks, teachers: {regime}"
        axis.set(xlim=(0, 1), ylim=(-0.6, len(arms) - 0.4), title=title)
    figure.savefig(path, metadata={"Date": None})


def report(table: Mapping[str, Any]) -> int:
    """Print both tables; 1 if a control passed the check that it must fail."""
    n_passed, plan = 0, table["preregistered"]
    changed = ", ".join(plan["changed_since"]) or "nothing"
    print(f"registered draw and size: {plan['is_this_draw']}; changed since then: {changed}")
    for regime, tables in table["regimes"].items():
        for by, of in tables.items():
            print(f"\n{regime}, the same {by}, {of['tasks']} tasks")
            for name, row in sorted(of["arms"].items(), key=lambda arm: -arm[1]["executed"]):
                low, high = row["interval"]
                right = "" if row["right"] is None else f"{row['n_lessons']} ({row['right']:.2f})"
                said = "; ".join(row.get("check", [])) or "passes"
                print(f"{name:40} {row['seeds']} seeds {right:12} {row['steps']:4} steps  "
                      f"{row['executed']:.3f} ({low:.3f} to {high:.3f})  {said}")  # fmt: skip
                n_passed += name.startswith("control") and not row["check"]
            if named := of.get("named"):
                low, high = named["interval"]
                print(f"{' minus '.join(NAMED)}: {100 * named['difference']:+.1f} points "
                      f"({100 * low:+.1f} to {100 * high:+.1f}, p = {named['p']:.3f})")  # fmt: skip
    return int(n_passed > 0)


def share(row: Mapping[str, Any]) -> str:
    """Write the share of right tasks with its interval."""
    low, high = (round(100 * each) for each in row["interval"])
    return f"{round(100 * row['executed'])} % ({low} to {high})"


NOT_RUN = (
    "Whether agreement is worth its price is open. Older draws had it ahead of one teacher, by 0 to 10 points, but did "
    "not use all purchases alike. On one that did, both were equal, and as shipped was behind by 7 points. A comparison "
    "by equal epochs [is registered](ROOTpreregistration.toml). [What a dollar buys](ROOTREADME.md) has the rest."
)


def headline(table: Mapping[str, Any] | None) -> str:
    """Say what the named comparison says, in five sentences and a picture, whatever it is."""
    regime = table["preregistered"]["regime"] if table else ""
    if table is None or "named" not in table["regimes"].get(regime, {}).get("epochs", {}):
        return NOT_RUN
    of = table["regimes"][regime]["epochs"]
    arms, named = of["arms"], of["named"]
    ours, theirs = (arms[name] for name in NAMED)
    low, high = (100 * each for each in named["interval"])
    verdict = "neither is surely ahead"
    if low > 0 or high < 0:
        verdict = f"as shipped is {'ahead' if low > 0 else 'behind'}"
    perfect = arms.get("perfect labels")
    best = f"; with perfect labels, to {round(100 * perfect['executed'])} %" if perfect else ""
    return (
        f"For the same {100 * table['run']['size']['usd']:.1f} cents and epochs, a small model acts right in "
        f"{round(100 * ours['executed'])} % of {of['tasks']} new tasks as shipped, and in "
        f"{round(100 * theirs['executed'])} % by one teacher's answers: {verdict} "
        f"({100 * named['difference']:+.0f} points, {low:+.0f} to {high:+.0f}, seeds: "
        f"{min(ours['seeds'], theirs['seeds'])}). Untrained, it comes to "
        f"{round(100 * arms['nothing']['executed'])} %{best}. "
        "The analysis was [fixed before](ROOTpreregistration.toml). [What a dollar buys](ROOTREADME.md) has the rest.\n\n"
        "![Right actions by arm](ROOTpicture.svg)"
    )


def pages(table: Mapping[str, Any]) -> str:
    """Write all tables in Markdown."""
    lines = []
    for regime, tables in table["regimes"].items():
        for by, of in tables.items():
            named = of.get("named")
            lines += [f"**Teachers `{regime}`, the same {by}**", ""]
            lines += [
                "| arm | seeds | lessons (right) | steps | acts right (95 %) | new words | check |"
            ]
            lines += ["|---|---|---|---|---|---|---|"]
            for name, row in sorted(of["arms"].items(), key=lambda arm: -arm[1]["executed"]):
                has = row["n_lessons"] and f"{row['n_lessons']} ({row['right']:.2f})".replace(
                    "0.", "."
                )
                told = "" if name == "nothing" else "fails" if row["check"] else "passes"
                cells = (name, row["seeds"], has or "", row["steps"], share(row),
                         f"{round(100 * row['new_words'])} %", told)  # fmt: skip
                lines.append(f"| {' | '.join(map(str, cells))} |")
            if named:
                low, high = (100 * each for each in named["interval"])
                lines += ["", f"As shipped minus one teacher: {100 * named['difference']:+.1f} points (95 % interval "
                          f"{low:+.1f} to {high:+.1f}, p = {named['p']:.3f})."]  # fmt: skip
            lines.append("")
    return "\n".join(lines).strip()


def put(page: Path, mark: str, text: str) -> None:
    """Put a text between two comments of a page."""
    before, begin, rest = page.read_text("utf-8").partition(f"<!--{mark}-->\n")
    _, end, after = rest.partition("<!--end-->")
    wrapped = "\n".join(line if line[:1] in "|*" else textwrap.fill(
        line, 125, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())  # fmt: skip
    page.write_text(before + begin + wrapped + "\n" + end + after, "utf-8")


def publish(folder: Path, table: Mapping[str, Any]) -> None:
    """Put what came out beside this file, and into both pages that tell it."""
    for name in ("table.json", "picture.svg"):
        (HERE / name).write_bytes((folder / name).read_bytes())
    put(HERE / "README.md", "headline", headline(table).replace("ROOT", ""))
    put(HERE / "README.md", "tables", pages(table))
    root = "recipes/what_a_dollar_buys/"
    put(HERE.parents[1] / "README.md", "headline", headline(table).replace("ROOT", root))


def main() -> int:
    """Write and print the tables, or print the digests of what a preregistration fixes."""
    if sys.argv[1:] == ["--digests"]:
        for name in ("arms.toml", "tasks.py", "tasks.toml", "run.py", "table.py"):
            print(f'"{name}" = "{digest_of(name)}"')
        return 0
    table = write(Path(sys.argv[1]))
    if "--publish" in sys.argv:
        publish(Path(sys.argv[1]), table)
    return report(table)


if __name__ == "__main__":
    sys.exit(main())
