"""Views of a data root for people: ranked pairs, one state, and the figures of a run or a night."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from replay_pipeline.pages import rank_pairs, show_state
from replay_pipeline.replay import spent_since
from replay_pipeline.replay.ask.rows import teacher_actions_from_table
from replay_pipeline.stages.project import Project, paired
from replay_pipeline.stages.spending import completed_batches
from replay_pipeline.stages.summary import summarize, summarize_night


def show(project: Project, state_id: str) -> str:
    """Return one state as text: the messages before it, the agent's action, and each answer.

    Raises:
        ConfigError: no state id, or more than one, begins with `state_id`.
    """
    batches = [
        batch
        for batch in project.root.batches("states")
        if any(
            known.startswith(state_id)
            for known in project.root.read("states", batch)["state_id"].to_pylist()
        )
    ]
    answered = [batch for batch in batches if project.root.has("teacher_actions", batch)]
    with_pairs = [batch for batch in batches if project.root.has("dpo_pairs", batch)]
    return show_state(
        state_id,
        states=project.states(batches),
        teacher_actions=[
            row
            for batch in answered
            for row in teacher_actions_from_table(project.root.read("teacher_actions", batch))
        ],
        pairs=[p for p in paired(project, with_pairs) if p["state_id"].startswith(state_id)],
        outcomes=[row for b in with_pairs for row in project.root.read("outcomes", b).to_pylist()],
    )


def ranked_pairs(project: Project) -> list[Mapping[str, Any]]:
    """Return the rows of all pairs, those first that most need a review.

    Raises:
        ConfigError: no batch has pairs yet.
    """
    project.batches_with("dpo_pairs")
    return rank_pairs(project.root.read_all("dpo_pairs").to_pylist())


def summary(project: Project, *, since: str) -> dict[str, Any]:
    """Return the figures of all stages. Work after the time `since` counts as new."""
    receipts = list(project.receipts.all(since=since))
    figures = summarize(receipts, n_teachers=project.n_teachers())
    figures["max_total_usd"] = project.settings.replay.max_total_usd
    figures["dataset"] = str(project.settings.dataset_dir())
    return figures


def night(
    project: Project, *, since: datetime, failures: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the finished work since then, and the open work. `failures` are failed runs."""
    return summarize_night(
        [each for each in project.receipts.all() if each.at >= since.isoformat()],
        since=since,
        spent_usd=spent_since(project.settings.ledger_url(), since),
        max_nightly_usd=project.settings.replay.max_nightly_usd,
        n_open=len(set(project.batches()) - completed_batches(project)),
        failures=failures,
    )
