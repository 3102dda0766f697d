"""The records of a call's way through the ledger: reserved, settled, known, lost."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

import msgspec

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
    """So long after its last byte was sent, the endpoint is sure to have ended the call."""
    body_sha: str | None = None
    """Name of the bytes that are sent: a router knows an answer by them."""
    partition: str | None = None
    is_patient: bool = True
    """Wait while money that is held may come back; otherwise be refused at once."""
    lost: tuple[int, ...] = ()
    """Lost calls for the same request that the caller knows of and asks again."""
    takes_over: bool = False
    """Take the reservations of `lost` over: at most one of all these calls is charged."""

    @property
    def slack(self) -> timedelta:
        """Return the longest time between a reservation and its call, unless the ledger is told more."""
        return timedelta(seconds=min(_MOST_SLACK_S, self.timeout_s * _SLACK))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """The money is held and the intent is on disk: the request may leave."""

    call_id: int
    reserved_nano: int
    sent_by: datetime | None = None
    """Until then it may leave without a further word to the ledger (`Ledger.sending`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """The call can never fit under `scope`, or waiting for it was given up."""

    scope: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A call that was decided before."""

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
    """Its last byte left no later."""
    due_at: datetime
    """From then on it can't be running any more."""
    error_code: str | None = None
    """How it was lost; `None` when its process died."""
    generation_id: str | None = None
    """Under this name the endpoint may know what it cost."""
    body_sha: str | None = None
    """Name of the bytes that were sent, where it is known."""

    @property
    def was_left_alone(self) -> bool:
        """Return whether only this side lost the call, so that the endpoint went on with it."""
        return self.error_code in (None, "given_up")


@dataclass(frozen=True, kw_only=True, slots=True)
class DisputedCall:
    """A call whose cost was not believed, so that it was booked at its bound."""

    call_id: int
    state_id: str
    teacher: str
    model: str
    cost_nano: int
    why: str
    sent_at: datetime
    due_at: datetime
    generation_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InDoubt:
    """Earlier calls for the same request are lost. The caller must decide about them."""

    lost: tuple[LostCall, ...]


@dataclass(frozen=True, slots=True)
class LedgerEntries:
    """The entries of a ledger for some requests, by request."""

    decided: dict[str, Known]
    lost: dict[str, tuple[LostCall, ...]]
    booked: dict[str, bytes]
    """Rows of calls that were paid for without an answer, and may be asked again."""
    paid_nano: Counter[str]
    """What all their calls have cost, by run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settlement:
    """The outcome of a reserved call, with its cost."""

    call_id: int
    state: Literal["answered", "failed", "unknown", "withdrawn"]
    """`withdrawn`: nothing was sent; the call is forgotten."""
    cost_nano: int = 0
    n_attempts: int = 1
    is_lasting: bool = False
    error_code: str | None = None
    row: bytes | None = None
    response: bytes | None = None
    generation_id: str | None = None
    sent_at: datetime | None = None
    """Of an unknown call: when its last byte left."""
    disputed: str | None = None
    """Why the cost that came with the answer is not believed; it is booked at its bound."""
    recovers: tuple[int, ...] = ()
    """Lost calls of which it is known now that they need no money of their own."""


_ROW = msgspec.json.Decoder(TeacherAction)
decode_row = _ROW.decode
"""A row as the ledger keeps it, back as a `TeacherAction`."""


def encode_row(row: TeacherAction) -> bytes:
    """Write a row as the ledger keeps it.

    Raises:
        msgspec.ValidationError: a field has another type than it was declared with, so that the
            row could not be read again.
    """
    told = msgspec.to_builtins(row)
    if row.logprobs is None:  # a row without them is the row of a program that knew none
        del told["logprobs"]
    encoded = msgspec.json.encode(told)
    decode_row(encoded)
    return encoded
