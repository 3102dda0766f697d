"""The review page: one HTML file that needs nothing else."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from replay_pipeline.inert_html import address_of, html_page, inert_json
from replay_pipeline.review.marks import FORMAT
from replay_pipeline.review.order import doubts, review_score
from replay_pipeline.review.sides import (
    headline_of,
    last_request,
    readable,
    shown_prefix,
    side_by_side,
    tools_of,
)
from replay_pipeline.storage.pair_rows import id_of_pair
from replay_pipeline.storage.store import Place, written_whole
from replay_pipeline.types import DPOPair

_HERE = Path(__file__).parent

_DATA_MARK = "\0data\0"


def write_review(
    pairs: Iterable[DPOPair],
    *,
    path: Place,
    outcomes: Iterable[Mapping[str, Any]] = (),
    title: str = "Preference pairs",
    look: Path | None = None,
    chances: Mapping[str, float] | None = None,
    max_prefix_chars: int = 12_000,
) -> Place:
    """Write a page to look through pairs side by side and mark them; open it in any browser.

    Pairs are written as they come, and shown in the order of `review_score`. The marks are
    exported from the page as JSON, which `read_marks` reads.

    Args:
        pairs: Pairs to show.
        path: The HTML file; it appears complete or not at all.
        outcomes: Rows of the table `outcomes`: states without a pair are listed too.
        title: Heading of the page.
        look: The page of `look`, to whose sessions pairs link.
        chances: With which probability each pair was drawn, if not all are shown; marks carry it.
        max_prefix_chars: How much of each prefix is kept in the page.

    Raises:
        StorageError: the file cannot be written.
    """
    outcomes = list(outcomes)
    head, tail = _page().split(_DATA_MARK)
    facts = {
        "title": title,
        "format": FORMAT,
        "look": address_of(look, seen_from=path) if look and isinstance(path, Path) else None,
        "outcomes": dict(Counter(str(row["outcome"]) for row in outcomes)),
        "chances": dict(chances) if chances else None,
    }
    with_pair: set[str] = set()
    key = hashlib.sha256()

    def items() -> Iterator[dict[str, Any]]:
        for pair in pairs:
            with_pair.add(pair["state_id"])
            yield _pair_item(pair, max_prefix_chars)
        yield from (_state_item(row) for row in outcomes if row["state_id"] not in with_pair)

    with written_whole(path) as file:
        file.write(f'{head}{inert_json(facts)[:-1]},"items":['.encode())
        for number, item in enumerate(items()):
            key.update((item.get("pair") or item["id"]).encode("utf-8", "replace"))
            file.write(f"{',' if number else ''}{inert_json(item)}".encode())
        file.write(f'],"key":"{key.hexdigest()[:16]}"}}{tail}'.encode())
    return path


def _pair_item(pair: DPOPair, max_prefix_chars: int) -> dict[str, Any]:
    chosen, rejected = pair.get("chosen_action"), pair.get("rejected_action")
    messages = pair.get("state_messages", [])
    rows = side_by_side(readable(rejected, pair["rejected"]), readable(chosen, pair["chosen"]))
    return {
        "id": pair["state_id"],
        "pair": id_of_pair(pair),
        "session": pair.get("session_id"),
        "outcome": "pair",
        "source": pair.get("source", "consensus"),
        "level": pair.get("agreement_level"),
        "teachers": pair.get("teachers_agreeing", []),
        "n_agreeing": pair["n_teachers_agreeing"],
        "n_asked": pair.get("n_teachers_asked"),
        "p_better": pair.get("p_better"),
        "margin": pair.get("margin"),
        "evidence": pair.get("evidence", []),
        "score": review_score(pair),
        "doubts": doubts(pair),
        "recorded": pair.get("outcome"),
        "hint": pair.get("hint"),
        "student": pair.get("student_model"),
        "rejected_source": pair.get("rejected_source"),
        "chosen_trial": pair.get("chosen_trial"),
        "rejected_trial": pair.get("rejected_trial"),
        "tools": sorted({*tools_of(chosen), *tools_of(rejected)}),
        "headline": headline_of(chosen, pair["chosen"]),
        "request": last_request(messages),
        "diff": rows,
        "prefix": shown_prefix(messages, max_chars=max_prefix_chars),
    }


def _state_item(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("level", "student_level", "near_level", "n_asked", "n_valid", "n_agreeing", "margin")
    return {
        "id": str(row["state_id"]),
        "session": row.get("session_id"),
        "outcome": str(row["outcome"]),
        "level": row.get("level"),
        "teachers": [],
        "tools": [],
        "facts": {key: row.get(key) for key in kept if row.get(key) is not None},
        "reason": row.get("invalid_reason"),
        "why": row.get("why"),
    }


def _page() -> str:
    """Give the page with a mark where the data go."""
    style, body, script = (
        (_HERE / f"page.{kind}").read_text("utf-8") for kind in ("css", "html", "js")
    )
    return html_page(
        title="Review of preference pairs", style=style, body=body, script=script, data=_DATA_MARK
    )
