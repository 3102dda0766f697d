"""A teacher that only looks, or keeps its books, is not done: its looks are answered, and it is asked on.

Each step is a question of its own, with its own hash and its own booking. So a stopped run goes on where
it was, and pays no step twice. The prompt of a step begins with that of the step before, which the provider has
in its cache.

What is asked after looks may cost a share of what first steps cost, or five cents in a small run. So teachers are
asked on once all first steps of a round are answered. Who goes on depends on these answers alone, not on the order in
which they came.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from replay_pipeline.actions import canonical_action
from replay_pipeline.actions.keys import purpose_of
from replay_pipeline.replay.buy.lanes import LEAST_LOOKS_USD, LaneQuestion, looked_at
from replay_pipeline.replay.dialects.base import RequestOptions
from replay_pipeline.replay.dialects.requests import RequestBuilder
from replay_pipeline.replay.money.calls import LedgerEntries, decode_row
from replay_pipeline.replay.money.ledger import Ledger
from replay_pipeline.types import (
    CANNOT_LOOK,
    STILL_LOOKING,
    UNFINISHED,
    Look,
    LookAnswer,
    Message,
    TeacherAction,
    TraceState,
)

MAX_LOOKS = 3
LOOKS_SHARE = 0.3
ANY_SHARE = 1e6
"""Where answers are measured: who looks must not be left out of it."""
_MARGIN = 1.1
"""Of what looks may cost, the next one is taken to need a tenth more than the last ones."""

AnswerLooks = Callable[[TraceState, Message], Sequence[LookAnswer] | None]
"""Returns what each call of a look would have shown at a state, or None if that can't be known of any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Looks:
    """How teachers that look are asked on."""

    options: RequestOptions
    answer: AnswerLooks | None = None
    """Without it, a look is an action like any other."""
    most: int = MAX_LOOKS
    """So many steps at most only look."""
    share: float = LOOKS_SHARE
    """So much of what first steps cost may be paid for the steps after them, or `LEAST_LOOKS_USD` unless it is 0."""

    @property
    def n_most(self) -> int:
        """Return how many steps of a question can only look."""
        return self.most if self.answer is not None else 0

    def follow(self, step: LaneQuestion, row: TeacherAction, state: TraceState) -> None:
        """Set what follows a step from its row: the next one, why there is none, or nothing."""
        action = row.action
        if self.answer is None or step.then or step.ended_by or row.error_code or action is None:
            return
        tools = state.get("tools") or None
        if purpose_of(canonical_action(action, cwd=state.get("cwd"), tools=tools)) is None:
            # It acts, or no client could carry it out. What it only says may be about what it could not see.
            is_told = bool(action.get("tool_calls")) or all(look.is_known for look in step.looks)
            step.ended_by = None if is_told else CANNOT_LOOK
            return
        if len(step.looks) >= self.most:
            step.ended_by = STILL_LOOKING
        elif (answers := self.answer(state, action)) is None:
            step.ended_by = CANNOT_LOOK
        else:
            self._go_on(step, row, state, action, answers)

    def _go_on(
        self,
        step: LaneQuestion,
        row: TeacherAction,
        state: TraceState,
        action: Message,
        answers: Sequence[LookAnswer],
    ) -> None:
        calls = [
            {**call, "id": call.get("id") or f"look_{len(step.looks)}_{number}"}
            for number, call in enumerate(action["tool_calls"])
        ]
        look = Look(
            action={**action, "tool_calls": calls},
            answers=tuple(answers),
            request_sha=step.question.sha,
            cost_usd=row.cost_usd,
            latency_s=row.latency_s,
            n_prompt_tokens=row.n_prompt_tokens,
            n_cached_tokens=row.n_cached_tokens,
            n_completion_tokens=row.n_completion_tokens,
        )
        looks = (*step.looks, look)
        asked = RequestBuilder(self.options).question(looked_at(state, looks[-1:]), step.teacher)
        step.then = replace(
            step,
            question=replace(asked, state_id=f"{(step.first or step).state_id}+{len(looks)}"),
            looks=looks,
            first=step.first or step,
            previous=step,
            lost=(),
            n_lost=0,
            n_read_tokens=None,
            is_asked=False,
        )

    def affordable(
        self, waiting: Collection[tuple[LaneQuestion, TeacherAction]], rows: Sequence[TeacherAction]
    ) -> list[tuple[LaneQuestion, TeacherAction]]:
        """Choose who is asked on next, for what looks may still cost.

        Whoever was asked on once comes first, then who has most other teachers to agree with, then the shortest
        prompts, which make the most votes of a dollar. Nobody else begins while two more steps of it may not be paid
        for, or else one. `waiting` are steps that only looked, whose next step is known, each with its row.
        """
        acted = Counter(row.state_id for row in rows if row.action and row.error_code is None)
        left_usd, usd_per_token = self._left(rows)
        ordered = sorted(
            waiting,
            key=lambda each: (
                not each[0].looks,
                -acted[(each[0].first or each[0]).state_id],
                each[1].n_prompt_tokens or 0,
                each[0].index,
            ),
        )
        for n_ahead in (2, 1):
            chosen, usd = [], left_usd
            for step, row in ordered:
                next_usd = _MARGIN * _next_usd(step, row, usd_per_token.get(row.teacher))
                next_usd *= 1 if step.looks else n_ahead
                if next_usd <= usd:
                    usd -= next_usd
                    chosen.append((step, row))
            if chosen:
                return chosen
        return []

    def end(
        self, waiting: Collection[tuple[LaneQuestion, TeacherAction]], rows: Sequence[TeacherAction]
    ) -> list[tuple[LaneQuestion, TeacherAction]]:
        """End those of the waiting steps that looks may not pay for, and return them; see `affordable`."""
        open_ = {step.index for step, _ in self.affordable(waiting, rows)}
        ended = [each for each in waiting if each[0].index not in open_]
        for step, _ in ended:
            step.then, step.ended_by = None, STILL_LOOKING
        return ended

    def end_known(self, steps: Iterable[LaneQuestion], entries: LedgerEntries) -> None:
        """End the questions that a run on what a ledger knows would end."""
        last = [each for step in steps if (each := _last_known(step, entries)) is not None]
        waiting = [(step, row) for step, row in last if step.then is not None]
        if waiting:
            self.end(waiting, [whole(step, row) for step, row in last])

    def _left(self, rows: Iterable[TeacherAction]) -> tuple[float, dict[str, float]]:
        """Return what looks may still cost, and what a token of a prompt costs each teacher, looks or else all."""
        first_usd = looks_usd = 0.0
        usd: dict[tuple[str, bool], float] = defaultdict(float)
        tokens = Counter[tuple[str, bool]]()
        firsts = ((row.looks[0] if row.looks else row, row) for row in rows)
        # The same request at another state costs nothing.
        for first, row in {first.request_sha: (first, row) for first, row in firsts}.values():
            after_usd = row.cost_usd - first.cost_usd
            if row.error_code == "outcome_unknown" and row.looks:
                after_usd += row.looks[-1].cost_usd  # what may be paid for already
            first_usd, looks_usd = first_usd + first.cost_usd, looks_usd + after_usd
            n_first, n_all = first.n_prompt_tokens or 0, row.n_prompt_tokens or 0
            for is_after, paid, n in ((False, first.cost_usd, n_first), (True, after_usd, n_all - n_first)):  # fmt: skip
                if n > 0:  # a server that answers again what it answered before may count none
                    usd[row.teacher, is_after] += paid
                    tokens[row.teacher, is_after] += n
        rates = {
            teacher: usd[teacher, is_after] / n for (teacher, is_after), n in sorted(tokens.items())
        }
        least_usd = LEAST_LOOKS_USD if self.share else 0.0
        return max(self.share * first_usd, least_usd) - looks_usd, rates

    def look_up(self, ledger: Ledger, steps: Iterable[LaneQuestion]) -> tuple[LedgerEntries, bool]:
        """Find what a ledger knows of questions and of the steps behind them, and whether that is all."""
        entries, steps, is_all = LedgerEntries(), list(steps), True
        while steps:
            found = ledger.lookup(step.question.sha for step in steps)
            entries.add(found)
            for step in steps:
                known = found.decided.get(step.question.sha)
                is_all &= known is not None
                if known is not None and self.answer is not None:
                    self.follow(step, decode_row(known.row), step.state)
            steps = [step.then for step in steps if step.then is not None]
        return entries, is_all


def _next_usd(step: LaneQuestion, row: TeacherAction, usd_per_token: float | None) -> float:
    """Return what the step behind a look should cost, from what tokens of prompts have cost this teacher."""
    if step.then is None or usd_per_token is None or not row.n_prompt_tokens:
        return row.cost_usd
    longer = step.then.question.size.n_bytes / max(1, step.question.size.n_bytes)
    return row.n_prompt_tokens * longer * usd_per_token


def _last_known(
    step: LaneQuestion, entries: LedgerEntries
) -> tuple[LaneQuestion, TeacherAction] | None:
    """Return the last step of a question that is known, and its row."""
    while step.then is not None and step.then.question.sha in entries.decided:
        step = step.then
    known = entries.decided.get(step.question.sha)
    return None if known is None else (step, decode_row(known.row))


def known_row(step: LaneQuestion, entries: LedgerEntries) -> Callable[[], TeacherAction] | None:
    """Return how to read the row of a question whose last step is known, too."""
    while step.then is not None:
        step = step.then
    known = entries.decided.get(step.question.sha)
    return None if known is None else lambda: whole(step, decode_row(known.row))


def whole(step: LaneQuestion, row: TeacherAction) -> TeacherAction:
    """Return the row of a question from that of its last step so far: costs and tokens are those of all steps."""
    looks = step.then.looks if step.then is not None else step.looks
    if not looks and step.ended_by is None:
        return row
    if step.then is not None:
        told = "it only looked so far, and waits to be asked on"
        row = replace(
            row, action=None, finish_reason=None, error_code=UNFINISHED, error_message=told
        )
    elif step.ended_by is not None:
        row = replace(row, error_code=step.ended_by, error_message=_TOLD[step.ended_by])
    others = step.looks
    return replace(
        row,
        state_id=(step.first or step).state_id,
        looks=looks,
        cost_usd=row.cost_usd + sum(look.cost_usd for look in others),
        latency_s=row.latency_s + sum(look.latency_s for look in others),
        n_prompt_tokens=_sum(row, others, "n_prompt_tokens"),
        n_cached_tokens=_sum(row, others, "n_cached_tokens"),
        n_completion_tokens=_sum(row, others, "n_completion_tokens"),
    )


_TOLD = {
    STILL_LOOKING: "it only looked, as often as it may (replay.max_looks) or for as much (replay.looks_share)",
    CANNOT_LOOK: "it would have looked at something that neither the log nor the files tell",
}


def _sum(row: TeacherAction, looks: Sequence[Look], name: str) -> int | None:
    counts = [n for each in (*looks, row) if (n := getattr(each, name)) is not None]
    return sum(counts) if counts else None
