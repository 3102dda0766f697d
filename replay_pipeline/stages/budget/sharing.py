"""Share money over the batches of a run, and over the runs of a night."""

from collections.abc import Sequence
from pathlib import Path

from replay_pipeline.replay import Estimate, counted_usd
from replay_pipeline.replay.buy.places import far_apart
from replay_pipeline.stages.project import Project

_PLANNED_ABOVE_BUDGET = 1.25
"""Estimates are rough: plan for a little more than there is, so that no money is left over."""
_LEAST_STATES = 5
"""A batch has a share only if that is likely to ask everybody at so many of its states: less would
hardly hold the bound of a call, and be left over."""
_N_PROJECTS = 20
"""So many projects have their share before money finishes what was begun."""


def covering(project: Project, batches: Sequence[str]) -> tuple[list[str], int]:
    """Order batches so that any first part of the list covers projects and time.

    Returns:
        The order, and how many batches at its beginning each add a new project.
    """
    folders = {
        each.key: {_project_folder(slice_.path) for slice_ in each.slices}
        for each in project.manifests()
    }
    first: list[str] = []
    rest: list[str] = []
    covered: set[str] = set()
    for key in far_apart(batches):
        new = folders.get(key, set()) - covered
        (first if new else rest).append(key)
        covered |= new
    return first + rest, len(first)


def _project_folder(path: Path) -> str:
    """Name the folder below `projects`, or else the one that a session lies in."""
    parts = path.parts
    if "projects" in parts[:-2]:
        return parts[len(parts) - parts[::-1].index("projects")]
    return str(path.parent)


def fitting(project: Project, batches: Sequence[str], *, max_total_usd: float) -> list[str]:
    """Return the batches to spend `max_total_usd` on, judged by the cost of earlier ones.

    They lie far apart, and come from as many projects as the money allows. The cost of a batch is
    assumed to grow with the bytes of its sessions. At least one batch is returned, and all batches
    if none was paid for yet. This is only a plan: the replay enforces the ceiling.
    """
    sizes = {batch.key: batch.n_bytes for batch in project.manifests()}
    reports = project.receipts.reports("replay")
    done = [key for key, report in reports.items() if report["is_complete"] and key in sizes]
    spent_usd = sum(reports[key]["spent_usd"] for key in done)
    n_bytes = sum(sizes[key] for key in done)
    if not (spent_usd and n_bytes):
        return list(batches)
    left_usd = max_total_usd * _PLANNED_ABOVE_BUDGET
    usd_per_state = spent_usd / max(1, sum(reports[key].get("n_states", 0) for key in done))
    order, n_first = covering(project, batches)
    chosen: set[str] = set()
    for place, key in enumerate(order[: _n_with_a_share(left_usd, usd_per_state)]):
        if chosen and left_usd <= 0 and place >= min(n_first, _N_PROJECTS):
            break
        paid_usd = reports.get(key, {}).get("spent_usd", 0.0)
        left_usd -= max(0.0, spent_usd / n_bytes * sizes.get(key, 0) - paid_usd)
        chosen.add(key)
    return [key for key in batches if key in chosen]


def shares_by_batch(
    project: Project, batches: Sequence[str], left_usd: float, found: Estimate | None
) -> dict[str, int]:
    """Return the number of states of each batch that gets a share of scarce money. Empty if there is enough."""
    if len(batches) < 2 or found is None or found.expected_usd <= left_usd:
        return {}
    order, _ = covering(project, batches)
    n_most = _n_with_a_share(left_usd, found.expected_usd / max(1, found.n_states))
    return {batch: project.root.n_rows("states", batch) for batch in order[:n_most]}


def _n_with_a_share(usd: float, usd_per_state: float) -> int:
    return max(1, int(usd / max(_LEAST_STATES * usd_per_state, 1e-12)))


def left_of_night(project: Project, night: str) -> float:
    """Return how much of a night's money is left, in US dollars."""
    spent_usd = counted_usd(project.settings.ledger_url(), f"night:{night}")
    return max(0.0, project.settings.replay.max_nightly_usd - spent_usd)
