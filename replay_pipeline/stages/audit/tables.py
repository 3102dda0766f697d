"""Checks of the tables of a batch: what one stage promises to the next."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from replay_pipeline.errors import CheckFailedError
from replay_pipeline.ingesters.fidelity import OF_SESSIONS, OF_STATES, shares_by_client
from replay_pipeline.stages.audit import AuditResult
from replay_pipeline.stages.receipts import Receipts, shares_near
from replay_pipeline.storage.tables import DataRoot
from replay_pipeline.types import ONLY_LOOKED

_MIN_FAITHFUL_SHARE = 0.9
_MIN_STATES_OF_CLIENT = 20
_NORMALIZED = ("normalized_pairs", "dropped_pairs", "normalized_positives", "dropped_positives")
_RUN_AGAIN = (
    "Run the stage that writes it again; if that does not help, it is a bug of this program."
)


def rows_accounted(root: DataRoot, batches: Sequence[str]) -> AuditResult:
    """Check that every row and every answer of a model is used, or left out with a reason."""
    problems, n_rows = [], 0
    for batch in batches:
        if receipt := Receipts(root.path).read("ingest", batch):
            report = receipt.report
            n_rows += report["rows"]
            lost = report["rows"] - report["rows_used"] - sum(report["skipped"].values())
            if lost:
                problems.append(f"batch {batch}: {lost} rows are neither used nor skipped")
            if lost := report.get("answers", {}).get("lost"):
                problems.append(f"batch {batch}: {lost} answers of models are in no table")
    return AuditResult(
        problems=problems,
        what_to_do="A reader lost rows without a reason, which is a bug: keep the session files "
        "and report it.",
        facts={"rows": n_rows},
        judged=n_rows,
    )


def whole_states(root: DataRoot, batches: Sequence[str]) -> AuditResult:
    """Has every state an id of its own, a session and a turn?"""

    def look(batch: str) -> Seen:
        states = _rows(root, "states", batch, ("state_id", "session_id", "turn_idx"))
        sessions = {row["session_id"] for row in _rows(root, "sessions", batch, ("session_id",))}
        turns = {
            (row["session_id"], row["turn_idx"])
            for row in _rows(root, "turns", batch, ("session_id", "turn_idx"))
        }
        return len(states), {
            "repeated": _repeated(row["state_id"] for row in states),
            "without its session or turn": [
                row["state_id"]
                for row in states
                if row["session_id"] not in sessions
                or (row["session_id"], row["turn_idx"]) not in turns
            ],
        }

    return _judged(batches, look, of="states")


def faithful_prefixes(root: DataRoot, batches: Sequence[str]) -> AuditResult:
    """Are predicted prompt tokens within 10 % of the recorded ones for 9 of 10 states?"""
    counts = shares_near(
        shares_by_client(
            root.read("sessions", batch, columns=OF_SESSIONS),
            root.read("states", batch, columns=OF_STATES),
        )
        for batch in batches
    )
    n_states, n_close = (sum(count[i] for count in counts.values()) for i in (0, 1))
    low = {
        client: count[1] / count[0]
        for client, count in {**counts, "all clients": (n_states, n_close)}.items()
        if count[0] >= _MIN_STATES_OF_CLIENT and count[1] < _MIN_FAITHFUL_SHARE * count[0]
    }
    return AuditResult(
        problems=[
            f"{client}: only {share:.0%} of the prefixes have the recorded length"
            for client, share in low.items()
        ],
        what_to_do="Look at the states with the lowest `fidelity`: their recorded prompt held "
        "something that the log does not, or that this version does not read of a newer client.",
        facts={
            "share_within_10_percent": n_close / n_states if n_states else 1.0,
            "states_with_recorded_usage": int(n_states),
            **{f"share, {client}": count[1] / count[0] for client, count in counts.items()},
        },
        is_warning=True,
        judged=int(n_states) if n_states >= _MIN_STATES_OF_CLIENT else 0,
    )


def answers_of_states(root: DataRoot, batches: Sequence[str]) -> AuditResult:
    """Is every answer to a state of the batch, once per teacher, with an action or a reason why not?"""

    def look(batch: str) -> Seen:
        known = {row["state_id"] for row in _rows(root, "states", batch, ("state_id",))}
        columns = ("state_id", "teacher", "action_text", "error_code", "cost_usd")
        answers = _rows(root, "teacher_actions", batch, columns)
        names = [f"{row['state_id']} by {row['teacher']}" for row in answers]
        return len(answers), {
            "answered twice": _repeated(names),
            "of no state": [row["state_id"] for row in answers if row["state_id"] not in known],
            "with neither an action nor a reason": [
                row["state_id"]
                for row in answers
                if row["action_text"] is None and row["error_code"] is None
            ],
            "with a cost below 0": [
                row["state_id"] for row in answers if (row["cost_usd"] or 0.0) < 0
            ],
        }

    what_to_do = (
        "The ledger has the truth: materialize `teacher_actions` again for this batch, "
        "which asks nothing twice."
    )
    return _judged(batches, look, of="answers", what_to_do=what_to_do)


def calls_answered(root: DataRoot, batches: Sequence[str]) -> AuditResult:
    """Did the teachers answer? A tenth of failed calls warns, and half of them ends the run.

    A batch with a few calls alone is judged with the others of its run.
    """
    by_teacher: dict[str, Counter[str]] = {}
    by_batch: dict[str, Counter[str]] = {}
    for batch in batches:
        for row in _rows(root, "teacher_actions", batch, ("teacher", "error_code")):
            for counts in (
                by_teacher.setdefault(row["teacher"], Counter()),
                by_batch.setdefault(batch, Counter()),
            ):
                has_answered = row["error_code"] in (None, *ONLY_LOOKED)
                counts[_ANSWERED if has_answered else row["error_code"]] += 1
    every: Counter[str] = sum(by_batch.values(), Counter())
    is_red = _share_failed(every) >= _MOST_FAILED or any(
        _share_failed(counts) >= _MOST_FAILED and counts.total() >= _ENOUGH_CALLS
        for counts in by_batch.values()
    )
    is_told = is_red or _share_failed(every) >= _MANY_FAILED
    return AuditResult(
        problems=[
            f"{name}: {counts.total() - counts[_ANSWERED]} of {counts.total()} calls failed "
            f"({', '.join(f'{n} {why}' for why, n in counts.most_common() if why != _ANSWERED)})"
            for name, counts in (*by_teacher.items(), *by_batch.items())
            if _share_failed(counts) >= _MANY_FAILED
            and (is_told or counts.total() >= _ENOUGH_CALLS)
        ],
        what_to_do="`replay-pipeline doctor` asks the teachers what is wrong. The next run asks again what "
        "failed for a reason that passes, and nothing that was answered.",
        facts={"failed_share": _share_failed(every)},
        is_warning=not is_red,
        judged=every.total(),
    )


_ANSWERED = "answered"
_MANY_FAILED, _MOST_FAILED = 0.1, 0.5
_ENOUGH_CALLS = 20


def _share_failed(counts: Counter[str]) -> float:
    return 1 - counts[_ANSWERED] / counts.total() if counts else 0.0


def budget_kept(root: DataRoot, batches: Sequence[str]) -> AuditResult:
    """Did no replay spend more than its ceiling?"""
    problems, n_usd, n_judged = [], 0.0, 0
    for batch in batches:
        if receipt := Receipts(root.path).read("replay", batch):
            report = receipt.report
            spent = report["newly_spent_usd"]
            ceiling = report["max_total_usd"]
            n_usd += spent
            n_judged += 1
            if spent > ceiling:
                problems.append(f"batch {batch}: {spent:.4f} USD spent of {ceiling:.4f}")
    return AuditResult(
        problems=problems,
        what_to_do="Stop the replay and compare `replay-pipeline status` with the provider's "
        "bill: a price in its list is lower than what it charges.",
        facts={"newly_spent_usd": n_usd},
        judged=n_judged,
    )


def sides_differ(
    root: DataRoot, batches: Sequence[str], *, table: str = "dpo_pairs"
) -> AuditResult:
    """Are both sides of every pair there and unlike, with votes that add up?"""
    columns = ("state_id", "chosen", "rejected", "n_teachers_agreeing", "n_teachers_asked")

    def look(batch: str) -> Seen:
        pairs = _rows(root, table, batch, columns)
        return len(pairs), {
            "with an empty or equal side": [
                row["state_id"]
                for row in pairs
                if not row["chosen"] or not row["rejected"] or row["chosen"] == row["rejected"]
            ],
            "with more votes than teachers asked": [
                row["state_id"]
                for row in pairs
                if (row["n_teachers_agreeing"] or 0) > (row["n_teachers_asked"] or 0)
            ],
        }

    return _judged(batches, look, of="pairs")


def kept_or_dropped(root: DataRoot, batches: Sequence[str]) -> AuditResult:
    """Are pairs and lessons in = kept + dropped, each dropped one with its operator?"""

    def look(batch: str) -> Seen:
        given = Counter(_ids(root, "dpo_pairs", batch) + _ids(root, "positives", batch))
        left = Counter(id for name in _NORMALIZED for id in _ids(root, name, batch))
        dropped = [
            row
            for name in ("dropped_pairs", "dropped_positives")
            for row in _rows(root, name, batch, ("state_id", "drop_operator"))
        ]
        return given.total(), {
            "neither kept nor dropped": list((given - left).elements()),
            "that came from nowhere": list((left - given).elements()),
            "dropped without a reason": [
                row["state_id"] for row in dropped if not row["drop_operator"]
            ],
        }

    what_to_do = (
        "Materialize `normalized_pairs` again for this batch: its pairs have changed "
        "since, or a custom operator loses rows."
    )
    return _judged(batches, look, of="pairs", what_to_do=what_to_do)


def refuse_unfit(root: DataRoot, batches: Sequence[str]) -> None:
    """Check that these batches may be published.

    Raises:
        CheckFailedError: a batch fails a check. The message says which, and what to do.
        SchemaError: a table is damaged.
        StorageError: a table is missing, or its store can't be reached.
    """
    for batch in batches:
        verdict = kept_or_dropped(root, [batch])
        if verdict.holds:
            verdict = sides_differ(root, [batch], table="normalized_pairs")
        if not verdict.holds:
            raise CheckFailedError(f"nothing was published: {verdict.message()}")


def _rows(root: DataRoot, name: str, batch: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return some columns of a table, which a batch may not have yet."""
    return root.read(name, batch, columns=columns).to_pylist() if root.has(name, batch) else []


def _ids(root: DataRoot, name: str, batch: str) -> list[str]:
    return [row["state_id"] for row in _rows(root, name, batch, ("state_id",))]


def _repeated(values: Iterable[Any]) -> list[Any]:
    return [value for value, count in Counter(values).items() if count > 1]


Seen = tuple[int, Mapping[str, Sequence[str]]]
"""How many rows of a batch were looked at, and the ids of those with a fault, by what it is."""


def _judged(
    batches: Sequence[str], look: Callable[[str], Seen], *, of: str, what_to_do: str = _RUN_AGAIN
) -> AuditResult:
    """Look at each batch; the rows of a fault are one problem, which names the first of them."""
    problems, n_rows = [], 0
    for batch in batches:
        n_seen, faults = look(batch)
        n_rows += n_seen
        problems += [
            f"batch {batch}: {len(ids)} {fault}, first {ids[0]}"
            for fault, ids in faults.items()
            if ids
        ]
    return AuditResult(problems=problems, what_to_do=what_to_do, facts={of: n_rows}, judged=n_rows)
