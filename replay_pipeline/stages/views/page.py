"""Show a data root as a page: its sessions, answers, pairs, dataset, and training."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from replay_pipeline.ingesters.fidelity import shares_by_client
from replay_pipeline.judge.precision import draw_next
from replay_pipeline.replay.ask.rows import teacher_actions_from_table
from replay_pipeline.settings import Settings
from replay_pipeline.stages.pages.compare import Comparison, pooled_accuracy
from replay_pipeline.stages.pages.costs import Row
from replay_pipeline.stages.pages.look import ALL_DAYS, Contents, Days, SessionRows, write_page
from replay_pipeline.stages.pages.overview import SessionTotals, results_by_model
from replay_pipeline.stages.pages.pairs import in_portions, portion
from replay_pipeline.stages.pages.training import training_shown
from replay_pipeline.stages.project import Project, paired
from replay_pipeline.stages.receipts import ALL, added, grouped
from replay_pipeline.storage.store import names_of_json, read_files
from replay_pipeline.types import TeacherAction

_PAIRS_A_PORTION = 250
"""What a browser opens at once, and a person looks through at most."""
_MOST_PORTIONS = 8
"""So many of the newest portions are in the page: each prompt in it is put together again."""
_TO_MARK = 40
_DRAWN_BY = ["pair_id", "p_better", "is_checked_right"]


def page_of(settings: Settings) -> Path:
    """Return the path of a data root's page on this machine."""
    return settings.local_dir().absolute() / "look" / "index.html"


def write_page_of(
    project: Project, to: Path | None = None, *, days: Days = ALL_DAYS
) -> dict[str, Any]:
    """Write the page of a data root, and return the figures of its overview.

    Raises:
        ConfigError: the folder has other files.
        StorageError: the page cannot be written.
    """
    return write_page(
        contents_of(project, days),
        to=to or page_of(project.settings).parent,
        on_progress=project.on_progress,
    )


def compare(project: Project) -> dict[str, Any]:
    """Return how often each teacher took the agent's action, and its cost, as the page shows them.

    `results` has what conversations with a known result cost by the model that wrote them.
    """
    rows, compared, sums = _SessionRows(project), Comparison(), SessionTotals()
    for session, turns, states in rows.sessions():
        facts = sums.add(session, turns, states)
        compared.add(facts, turns, states, rows.answered(states))
    figures = compared.figures(_accuracy(project)) or {"teachers": []}
    return {**figures, "results": results_by_model(sums.sessions)}


def _accuracy(project: Project) -> dict[str, float]:
    reports = project.receipts.reports("pairs", names=["reliability"])
    return pooled_accuracy(report.get("reliability") for report in reports.values())


def _verdicts(project: Project) -> list[dict[str, Any]]:
    shown = ("words", "model", "than", "difference", "low", "high", "margin", "again")
    receipts = sorted(project.receipts.all(stage="verdict"), key=lambda each: each.at, reverse=True)
    return [
        {"at": each.at[:10], **{name: each.report.get(name) for name in shown}}
        for each in receipts
        if "words" in each.report
    ]


def contents_of(project: Project, days: Days = ALL_DAYS) -> Contents:
    """Return everything that the page shows."""
    rows = _SessionRows(project)
    portions = list(_portions(project))
    control = project.receipts.read("control", ALL)
    left = control.report.get("left") if control else None
    return Contents(
        sessions=rows.sessions(),
        days=days,
        n_sessions=rows.n_sessions,
        answers=rows.answered if project.root.batches("teacher_actions") else None,
        accuracy=_accuracy(project),
        verdicts=_verdicts(project),
        agent_alike=None if left is None else 1 - left,
        pairs=(_portion(project, title, batches) for title, batches in portions),
        portion_of=_portion_of(project, portions),
        dataset=_dataset(project),
        training=_training(project),
        read=_read(project),
        root=project.root.path.name,
        is_redacted=project.settings.ingest.is_redacted,
    )


def _read(project: Project) -> dict[str, Any]:
    names = ("redactions", "skipped", "skipped_files")
    reports = list(project.receipts.reports("ingest", names=names).values())
    counts = {name: added(report.get(name) or {} for report in reports) for name in names}
    sessions, states = (project.root.read_all(name) for name in ("sessions", "states"))
    return {**counts, "fidelity": shares_by_client(sessions, states)}


class _SessionRows:
    """The rows of a data root by session, though a session that grew is in several batches."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._batches = project.root.batches("states")
        self._last: dict[str, str] = {}
        for batch in self._batches:
            table = project.root.read("sessions", batch, columns=["session_id"])
            self._last.update(dict.fromkeys(table["session_id"].to_pylist(), batch))
        self.n_sessions = len(self._last)
        self._answers: dict[str, list[TeacherAction]] = {}

    def sessions(self) -> Iterator[SessionRows]:
        """Yield each session once, with the newest row of each of its turns and states."""
        held: dict[str, SessionRows] = {}
        root = self._project.root
        for batch in self._batches:
            turns, states = (
                grouped(root.read(name, batch).to_pylist(), lambda row: row["session_id"])
                for name in ("turns", "states")
            )
            if root.has("teacher_actions", batch):
                for answer in teacher_actions_from_table(root.read("teacher_actions", batch)):
                    self._answers.setdefault(answer.state_id, []).append(answer)
            for session in root.read("sessions", batch).to_pylist():
                name = session["session_id"]
                rows = _merged(held.get(name), session, turns.get(name, []), states.get(name, []))
                if self._last[name] == batch:
                    held.pop(name, None)
                    yield rows
                else:
                    held[name] = rows

    def answered(self, states: Sequence[Row]) -> Mapping[str, Sequence[TeacherAction]]:
        """Return the answers at some states, and forget them."""
        found = {s["state_id"]: self._answers.pop(s["state_id"], ()) for s in states}
        return {
            name: list({a.teacher: a for a in answers}.values()) for name, answers in found.items()
        }


def _merged(
    before: SessionRows | None, session: Row, turns: Sequence[Row], states: Sequence[Row]
) -> SessionRows:
    old_turns, old_states = (before[1], before[2]) if before else ([], [])
    by_turn = {row["turn_idx"]: row for row in (*old_turns, *turns) if row["turn_idx"] >= 0}
    by_state = {row["state_id"]: row for row in (*old_states, *states)}
    if before is None:
        joined = session
    else:
        first = [r["first_timestamp"] for r in (before[0], session) if r["first_timestamp"]]
        last = [r["last_timestamp"] for r in (before[0], session) if r["last_timestamp"]]
        joined = {
            **session,
            "models": sorted({*(before[0]["models"] or ()), *(session["models"] or ())}),
            "first_timestamp": min(first, default=None),
            "last_timestamp": max(last, default=None),
            "title": session.get("title") or before[0].get("title"),
        }
    return (
        joined,
        [by_turn[index] for index in sorted(by_turn)],
        sorted(by_state.values(), key=lambda row: row["turn_idx"]),
    )


def _portions(project: Project) -> Iterator[tuple[str, list[str]]]:
    """Yield the titles and the batches of what is shown of the pairs; first, those to mark next."""
    reports = project.receipts.reports("pairs", names=["n_pairs"])
    sizes = [(batch, int(report["n_pairs"])) for batch, report in sorted(reports.items())]
    if not sizes:
        return
    if sum(n for _, n in sizes):
        yield "To mark next", []
    found = list(in_portions(sizes, _PAIRS_A_PORTION))
    for number, batches in enumerate(found[:_MOST_PORTIONS], 1):
        title = "All pairs" if len(found) == 1 else f"{batches[0]} to {batches[-1]}"
        if number == _MOST_PORTIONS < len(found):
            title += f", and {len(found) - number} older portions are not in this page"
        yield title, batches


def _portion(project: Project, title: str, batches: list[str]) -> dict[str, Any]:
    reports = project.receipts.reports("pairs", names=["marks"]).values()
    said = {key: mark for report in reports for key, mark in (report.get("marks") or {}).items()}
    marks = {key: mark for key, (mark, _) in said.items()}
    if batches:
        outcomes = [row for b in batches for row in project.root.read("outcomes", b).to_pylist()]
        results = _results(outcomes)
        return portion(title, paired(project, batches), outcomes, marks=marks, results=results)
    rows = project.root.read_all("dpo_pairs").select(_DRAWN_BY).to_pylist()
    claims = {
        row["pair_id"]: row["p_better"] or 0.0 for row in rows if row["is_checked_right"] is None
    }
    chances = draw_next(claims, _TO_MARK, {key: chance for key, (_, chance) in said.items()})
    everywhere = project.batches_with("dpo_pairs")
    drawn = [
        pair for pair in paired(project, everywhere) if pair["pair_id"] in chances.keys() - said
    ]
    columns = ["state_id", "trials_json"]
    results = _results(
        row
        for batch in everywhere
        for row in project.root.read("outcomes", batch, columns=columns).to_pylist()
    )
    title = f"{len(drawn)} to mark next"
    return portion(title, drawn, chances=chances, marks=marks, results=results)


def _results(outcomes: Iterable[Row]) -> dict[str, Row]:
    """Return what became of actions, by state, where anything is known of it."""
    return {row["state_id"]: row for row in outcomes if row["trials_json"]}


def _portion_of(project: Project, portions: Sequence[tuple[str, list[str]]]) -> dict[str, int]:
    return {
        state_id: number
        for number, (_, batches) in enumerate(portions)
        for batch in batches
        for state_id in project.root.read("outcomes", batch, columns=["state_id"])[
            "state_id"
        ].to_pylist()
    }


def _dataset(project: Project) -> dict[str, Any] | None:
    receipt = project.receipts.read("publish", ALL)
    if receipt is None:
        return None
    names = ("rows_by_split", "checks", "dataset", "repo_id")
    dropped = project.receipts.reports("normalize", names=["dropped"]).values()
    place = project.place_of("dataset/README.md")
    card = place.read_text("utf-8").split("---\n", 2)[-1].strip() if place.exists() else None
    return {
        **{name: receipt.report.get(name) for name in names},
        "dropped": added(report.get("dropped") or {} for report in dropped),
        "card": card,
        "lengths": _lengths(project),
    }


def _lengths(project: Project) -> list[dict[str, int]]:
    """Return how many published pairs are how long, in tokens."""
    folder = project.place_of("dataset/manifests")
    names = [f"{name}.json" for name in names_of_json(folder) if not name.startswith("_")]
    tokens = [json.loads(text).get("tokens", {}) for text in read_files(folder, names) if text]
    found = added(each.get("pairs", {}).get("pairs", {}) for each in tokens)
    sizes = sorted((int(size), n) for size, n in found.items())
    return [{"n_tokens": size, "n": n} for size, n in sizes]


def _training(project: Project) -> dict[str, Any] | None:
    receipt = project.receipts.read("train", ALL)
    if receipt is None:
        return None
    folder = project.settings.model_dir()
    evaluation, inspected = (
        json.loads(text) if text else None
        for text in read_files(folder, ["evaluation.json", "inspected.json"])
    )
    return training_shown(receipt.report, evaluation, inspected)
