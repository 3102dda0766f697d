"""The records of a call in the ledger: reserved, settled, known, or lost."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

import msgspec

from replay_pipeline.replay.dialects.prices import usd
from replay_pipeline.types import TeacherAction

_MOST_SLACK_S = 5.0
_SLACK = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class NewCall:
    """A call about to be made, and the most it can cost."""

    request_sha: str
    state_id: str
    teacher: str
    model: str
    run_id: str
    scopes: tuple[str, ...]
    reserved_nano: int
    timeout_s: float = 600.0
    """After this many seconds without an answer, the endpoint has surely ended the call."""
    body_sha: str | None = None
    """Hash of the request body. A router identifies its stored answer by these bytes."""
    partition: str | None = None
    lost: tuple[int, ...] = ()
    """Lost calls for the same request that the caller knows about and now repeats."""
    takes_over: bool = False
    """Take over the reservations of `lost`, since at most one of these calls is charged."""

    @property
    def slack(self) -> timedelta:
        """Return the longest time between a reservation and its call, unless the ledger is told otherwise."""
        return timedelta(seconds=min(_MOST_SLACK_S, self.timeout_s * _SLACK))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """The money is reserved and the intent is on disk, so the request may leave."""

    call_id: int
    reserved_nano: int
    sent_by: datetime | None = None
    """Until this time the call may leave. Later it must call `Ledger.sending` first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """The call can never fit under `scope`, or the run gave up waiting."""

    scope: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A call whose outcome is already in the ledger."""

    request_sha: str
    run_id: str
    cost_nano: int
    row: bytes
    """JSON of the `TeacherAction`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LostCall:
    """A call that was sent and whose outcome is not known."""

    call_id: int
    request_sha: str
    state_id: str
    teacher: str
    model: str
    run_id: str
    scopes: tuple[str, ...]
    reserved_nano: int
    sent_at: datetime
    """Latest time at which its last byte can have left."""
    due_at: datetime
    """After this time it can't be running any more."""
    error_code: str | None = None
    """How it was lost; `None` when its process died."""
    generation_id: str | None = None
    """The id under which the endpoint may know its cost."""
    body_sha: str | None = None
    """Hash of the request body, if known."""

    @property
    def was_left_alone(self) -> bool:
        """Return whether only this side lost the call, so that the endpoint finished it."""
        return self.error_code in (None, "given_up")


@dataclass(frozen=True, kw_only=True, slots=True)
class InDoubt:
    """Earlier calls for the same request are lost, and the caller must decide what to do."""

    lost: tuple[LostCall, ...]


@dataclass(frozen=True, slots=True)
class LedgerEntries:
    """The entries of a ledger for some requests, by request."""

    decided: dict[str, Known] = field(default_factory=dict)
    lost: dict[str, tuple[LostCall, ...]] = field(default_factory=dict)
    booked: dict[str, bytes] = field(default_factory=dict)
    """Rows of calls that were paid for without an answer. They may be asked again."""
    paid_nano: Counter[str] = field(default_factory=Counter)
    """The cost of all their calls, by run."""

    def add(self, other: "LedgerEntries") -> None:
        """Add the entries for other requests."""
        self.decided.update(other.decided)
        self.lost.update(other.lost)
        self.booked.update(other.booked)
        self.paid_nano.update(other.paid_nano)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settlement:
    """The outcome of a reserved call, with its cost."""

    call_id: int
    state: Literal["answered", "failed", "unknown", "withdrawn"]
    """With `withdrawn`, nothing was sent, and the ledger forgets the call."""
    cost_nano: int = 0
    n_attempts: int = 1
    is_lasting: bool = False
    error_code: str | None = None
    row: bytes | None = None
    response: bytes | None = None
    generation_id: str | None = None
    sent_at: datetime | None = None
    """When the last byte of a call with an unknown outcome left."""
    disputed: str | None = None
    """Why the reported cost isn't believed. The call is then booked at its bound."""
    recovers: tuple[int, ...] = ()
    """Lost calls that are now known to need no money of their own."""


_ROW = msgspec.json.Decoder(TeacherAction)
decode_row = _ROW.decode
"""Read a row of the ledger as a `TeacherAction`."""


def encode_row(row: TeacherAction) -> bytes:
    """Return a row in the form that the ledger stores.

    Raises:
        msgspec.ValidationError: a field has the wrong type, so the row could not be read again.
    """
    encoded = msgspec.json.encode(row)
    decode_row(encoded)
    return encoded


def settled_lost(lost: LostCall, cost: int) -> Settlement:
    """Book a lost call at its known cost, or else at its bound. Its answer stays lost."""
    is_too_slow = lost.error_code == "no_reply"
    waited_s = (lost.due_at - lost.sent_at).total_seconds()
    row = TeacherAction(
        state_id=lost.state_id,
        teacher=lost.teacher,
        model=lost.model,
        cost_usd=usd(cost),
        latency_s=waited_s if is_too_slow else 0.0,
        request_sha=lost.request_sha,
        generation_id=lost.generation_id,
        error_code=lost.error_code or "outcome_unknown",
        error_message=f"no reply within {waited_s:g} s: raise the teacher's timeout_s"
        if is_too_slow
        else "no reply came back; it is booked at the most it can have cost",
    )
    return Settlement(
        call_id=lost.call_id,
        state="failed",
        cost_nano=cost,
        is_lasting=is_too_slow,
        error_code=row.error_code,
        row=encode_row(row),
        generation_id=lost.generation_id,
    )
