"""Draw the comparison of models: dollars against the share of decisions with the same action."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replay_pipeline.errors import MissingDependencyError
from replay_pipeline.storage.store import written_whole


def write_svg(found: Mapping[str, Any], path: Path) -> None:
    """Draw the result of `Comparison.figures` with 95 % intervals. The picture has no text from sessions.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        StorageError: the file cannot be written.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "--svg needs matplotlib: pip install 'replay-pipeline[train]'"
        ) from error
    # Texts stay texts, and the same figures make the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "replay-pipeline"}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        for each in found["teachers"]:
            low, high = each["interval"]
            share = each["share_alike"]
            axes.errorbar(
                100 * each["usd_per_decision"],
                share,
                yerr=[[share - low], [high - share]],
                fmt="o",
                capsize=4,
                label=f"{each['teacher']} ({each['n']:,} answers)",
            )
        if (agent := found.get("agent_usd_per_decision")) is not None:
            axes.plot(100 * agent, 1.0, "k*", markersize=12, label="the agent itself")
        axes.set(xlabel="US dollars per 100 decisions", ylabel="share of decisions taken alike")
        axes.set_ylim(0, 1.05)
        axes.set_xlim(left=0)
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
        axes.grid(alpha=0.3)
        title = "Which model could have been used"
        if found["played"]:
            title += " (made up in a rehearsal)"
        axes.set_title(title)
        axes.legend(loc="best")
        figure.text(
            0.01, -0.03, "The same action is not the same outcome of a session.", fontsize=8
        )
        with written_whole(path) as file:
            figure.savefig(file, format="svg", metadata={"Date": None}, bbox_inches="tight")
