"""Checks of the trained model, from the report that its trainer wrote."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from replay_pipeline.stages.audit import AuditResult
from replay_pipeline.storage.store import Place, read_files


def acts_as_well(folder: Place) -> AuditResult:
    """Does the model take the consensus action, and write well-formed calls, as often as before?

    Both times greedy, at the same held-out states, before and after training. See docs/train.md.
    """
    report = _report(folder)
    if "acts_worse" not in report:
        return AuditResult(judged=0)
    worse = [one for one in report["findings"] if "acts worse" in one or "general text" in one]
    return AuditResult(
        problems=worse if report["acts_worse"] else [],
        what_to_do="It ranks pairs and has lost how to act: do not publish it. Raise "
        "`trl.drift_weight` or `trl.rpo_alpha`, or lower `trl.learning_rate`, and train again.",
        facts=_figures(report, "consensus_rate", "valid_calls", "general_loss"),
        judged=report.get("held_out_states", 0),
    )


def learned_something(folder: Place) -> AuditResult:
    """Did training move held-out pairs towards their chosen sides, more than chance does?"""
    report = _report(folder)
    if "learned" not in report:
        return AuditResult(judged=0)
    nothing = [one for one in report["findings"] if one.startswith("nothing was learned")]
    return AuditResult(
        problems=nothing if report["learned"] is False else [],
        what_to_do="Look at the pairs (`replay-pipeline pairs show`) before you train longer: labels that "
        "are no better than a coin, or a learning rate of nothing, end like this.",
        facts=_figures(report, "preference_accuracy", "prompt_gain"),
        judged=0 if report["learned"] is None else report.get("held_out_pairs", 0),
    )


CHECKS: Mapping[str, Callable[[Place], AuditResult]] = {
    "acts_as_well_as_before": acts_as_well,
    "something_was_learned": learned_something,
}
"""The checks of a trained model, by name."""


def _report(folder: Place) -> dict[str, Any]:
    [text] = read_files(folder, ["report.json"])
    return json.loads(text) if text else {}


def _figures(report: Mapping[str, Any], *names: str) -> dict[str, float]:
    places = (f"{name}_{when}" for name in names for when in ("before", "after"))
    return {place: report[place] for place in places if report.get(place) is not None}
