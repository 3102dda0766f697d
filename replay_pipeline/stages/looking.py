"""What people look at in a data root: pairs side by side, one state, the sums of a run and of a night."""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from replay_pipeline.errors import ConfigError
from replay_pipeline.reliability import draw
from replay_pipeline.replay import spent_since
from replay_pipeline.replay.rows import teacher_actions_from_table
from replay_pipeline.review import rank_pairs, show_state, write_review
from replay_pipeline.stages.project import Project, digest_of
from replay_pipeline.stages.receipts import Receipt
from replay_pipeline.stages.spending import completed_batches
from replay_pipeline.stages.summary import summarize, summarize_night
from replay_pipeline.storage.store import Place

REVIEW_PAGE = "review.html"
_SAMPLE_PAGE = "review-sample.html"
_DRAWN_BY = ["pair_id", "p_better", "is_checked_right"]
_PAIRS_A_PAGE = 250
"""What a browser opens at once, and a person looks through at most."""


def show(project: Project, state_id: str) -> str:
    """One state as text: what came before, the student's action, each teacher's answer.

    Raises:
        ConfigError: no state, or more than one, begins with `state_id`.
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
    paired = [batch for batch in batches if project.root.has("dpo_pairs", batch)]
    return show_state(
        state_id,
        states=project.states(batches),
        teacher_actions=[
            row
            for batch in answered
            for row in teacher_actions_from_table(project.root.read("teacher_actions", batch))
        ],
        pairs=[p for p in project.paired(paired) if p["state_id"].startswith(state_id)],
        outcomes=[row for b in paired for row in project.root.read("outcomes", b).to_pylist()],
    )


def review(
    project: Project, path: Place | None = None, *, look: Path | None = None, page: int = 1
) -> Place:
    """Write a page that shows pairs side by side, those of the newest batches first.

    Pairs link to their sessions in `look`, the page of `replay-pipeline look`. Where there are
    more pairs than fit on a page, each page has some batches as a whole. Returns where it is.

    Raises:
        ConfigError: no batch has come as far as pairs, or there are not so many pages.
    """
    pages = _review_pages(project)
    if not 1 <= page <= len(pages):
        raise ConfigError(f"there is no page {page} of pairs: the last is {len(pages)}")
    batches = pages[page - 1]
    name = REVIEW_PAGE if page == 1 else f"review-{page}.html"
    started = time.perf_counter()
    title = "Preference pairs"
    if len(pages) > 1:
        title += f", page {page} of {len(pages)}: {batches[0]} to {batches[-1]}"
    written = write_review(
        project.paired(batches),
        path=path or project.root.path / name,
        look=look,
        outcomes=pa.concat_tables([project.root.read("outcomes", b) for b in batches]).to_pylist(),
        title=title,
    )
    if path is None:
        project.receipts.write(
            Receipt(
                stage="review",
                batch="all" if page == 1 else f"page-{page}",
                fingerprint="",
                report={},
                seconds=round(time.perf_counter() - started, 3),
                files={name: digest_of(written)},
            )
        )
    return written


def review_sample(
    project: Project, n: int, path: Place | None = None, *, look: Path | None = None
) -> Place:
    """Write a page with the `n` pairs whose check tells most about how many are right.

    Raises:
        ConfigError: no batch has come as far as pairs.
    """
    batches = project.batches_with("dpo_pairs")
    rows = project.root.read_all("dpo_pairs").select(_DRAWN_BY).to_pylist()
    open_rows = [row for row in rows if row["is_checked_right"] is None]
    chances = draw({row["pair_id"]: row["p_better"] or 0.0 for row in open_rows}, n)
    return write_review(
        (pair for pair in project.paired(batches) if pair.get("pair_id") in chances),
        path=path or project.root.path / _SAMPLE_PAGE,
        look=look,
        title=f"{len(chances)} pairs to check",
        chances=chances,
    )


def n_review_pages(project: Project) -> int:
    """Tell over how many pages the pairs are spread. Raises as `review` does."""
    return len(_review_pages(project))


def _review_pages(project: Project) -> list[list[str]]:
    """Batches by page, the newest on the first; in their order on each."""
    reports = project.receipts.reports("pairs", names=["n_pairs"])
    sizes = {key: report["n_pairs"] for key, report in reports.items()}
    pages: list[list[str]] = [[]]
    n_pairs = 0
    # Receipts name the batches without a look into ten thousand folders.
    for batch in reversed(sorted(sizes) or project.batches_with("dpo_pairs")):
        n = sizes[batch] if batch in sizes else project.root.n_rows("dpo_pairs", batch)
        if n_pairs and n_pairs + n > _PAIRS_A_PAGE:
            pages.append([])
            n_pairs = 0
        pages[-1].insert(0, batch)
        n_pairs += n
    return pages


def ranked_pairs(project: Project) -> list[Mapping[str, Any]]:
    """Give the rows of all pairs, those first that are most worth a person's look.

    Raises:
        ConfigError: no batch has come as far as pairs.
    """
    project.batches_with("dpo_pairs")
    return rank_pairs(project.root.read_all("dpo_pairs").to_pylist())


def summary(project: Project, *, since: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """Give the figures of all stages; what was done after `since` counts as done now."""
    receipts = list(project.receipts.figures(since=since))
    figures = summarize(receipts, n_teachers=project.n_teachers())
    figures["max_total_usd"] = project.settings.replay.max_total_usd
    figures["dataset"] = str(project.settings.dataset_dir())
    return figures


def night(
    project: Project, *, since: datetime, failures: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Tell what was done since then, and what is still open; `failures` are runs that failed."""
    return summarize_night(
        [each for each in project.receipts.figures() if each.at >= since.isoformat()],
        since=since,
        spent_usd=spent_since(project.settings.ledger_url(), since),
        max_nightly_usd=project.settings.replay.max_nightly_usd,
        n_open=len(set(project.batches()) - completed_batches(project)),
        failures=failures,
    )
