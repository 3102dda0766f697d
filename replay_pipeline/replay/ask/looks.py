"""A teacher that only looks, or keeps its books, is not done: its looks are answered, and it is asked on.

Each step is a question of its own, with its own hash and its own booking. So a stopped run goes on where
it was, and pays no step twice. The prompt of a step begins with that of the step before, which the provider has
in its cache.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from replay_pipeline.actions import canonical_action
from replay_pipeline.actions.keys import purpose_of
from replay_pipeline.replay.buy.lanes import LaneQuestion, looked_at
from replay_pipeline.replay.dialects import RequestOptions
from replay_pipeline.replay.dialects.requests import RequestBuilder
from replay_pipeline.replay.money.calls import LedgerEntries, decode_row
from replay_pipeline.replay.money.ledger import Ledger
from replay_pipeline.types import Look, LookAnswer, Message, TeacherAction, TraceState

MAX_LOOKS = 3
LOOKS_SHARE = 0.5
STILL_LOOKING = "still_looking"
"""The teacher looked as often as it may, and did nothing yet."""
CANNOT_LOOK = "cannot_look"
"""Nobody can truly say what it would have seen."""
UNFINISHED = "unfinished"
"""It waits for the next run."""
NO_VOTES = (STILL_LOOKING, CANNOT_LOOK)
ONLY_LOOKED = (*NO_VOTES, UNFINISHED)
"""What a teacher that did nothing yet has in the place of an error: its calls were answered."""

AnswerLooks = Callable[[TraceState, Message], Sequence[LookAnswer] | None]
"""Returns what each call of a look would have shown at a state, or None if that can't be known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Looks:
    """How teachers that look are asked on."""

    options: RequestOptions
    answer: AnswerLooks | None = None
    """Without it, a look is an action like any other."""
    most: int = MAX_LOOKS
    """So many steps at most only look."""

    @property
    def n_most(self) -> int:
        """Return how many steps of a question can only look."""
        return self.most if self.answer is not None else 0

    def follow(self, step: LaneQuestion, row: TeacherAction, state: TraceState) -> None:
        """Set what follows a step from its answer: the next one, why there is none, or nothing.

        Args:
            step: the question that was asked.
            row: its row.
            state: its state, with the looks before.
        """
        action = row.action
        if self.answer is None or step.then or step.ended_by or row.error_code or action is None:
            return
        tools = state.get("tools") or None
        if purpose_of(canonical_action(action, cwd=state.get("cwd"), tools=tools)) is None:
            return  # it acts, or no client could carry it out
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
    STILL_LOOKING: "it only looked, as often as it may (replay.max_looks)",
    CANNOT_LOOK: "it would have looked at something that neither the log nor the files tell",
}


def _sum(row: TeacherAction, looks: Sequence[Look], name: str) -> int | None:
    counts = [n for each in (*looks, row) if (n := getattr(each, name)) is not None]
    return sum(counts) if counts else None
