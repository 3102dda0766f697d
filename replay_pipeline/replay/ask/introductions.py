"""Limit the calls to an endpoint until it has shown that it serves the intended model."""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping

from replay_pipeline.errors import TeacherError
from replay_pipeline.replay.ask.lanes import Slots
from replay_pipeline.replay.dialects.prices import Price
from replay_pipeline.replay.dialects.replies import NO_COMPLETION, OTHER_MODEL, Answer, Failure
from replay_pipeline.types import TeacherSpec

logger = logging.getLogger(__name__)

_N_FIRST = 3
"""So many calls are in flight at most until an endpoint has sent a chat completion of the model that
was asked; and so many replies in a row that are none end it."""
_ANY = "*"
_CHOSEN_FOR_YOU = re.compile(r"^(openrouter/|@)")
"""Names under which a router picks a model itself."""


class Introductions:
    """The slots of each teacher, which stay few until its endpoint has proven itself.

    Args:
        prices: price by teacher. A price may contain another name of the model.
        answered_before: teachers with answers in the ledger. Their endpoints get all slots as soon
            as they list their models, which costs nothing.
        lists_models: asks an endpoint for its list of models. Raises TeacherError if it sends none.
    """

    def __init__(
        self,
        prices: Mapping[str, Price],
        *,
        answered_before: Collection[str],
        lists_models: Callable[[TeacherSpec], Awaitable[object]],
    ) -> None:
        self._prices = prices
        self._answered_before = answered_before
        self._lists_models = lists_models
        self._slots: dict[str, Slots] = {}
        self._met: set[str] = set()
        self._n_wrong: Counter[str] = Counter()
        self._looks: set[asyncio.Task[None]] = set()

    def slots(self, teacher: TeacherSpec) -> Slots:
        """Return the slots of a teacher."""
        if teacher.name not in self._slots:
            self._slots[teacher.name] = Slots(teacher.max_concurrency, n_first=_N_FIRST)
            if teacher.name in self._answered_before:
                self._looks.add(asyncio.create_task(self._look(teacher)))
        return self._slots[teacher.name]

    def all_slots(self) -> Collection[Slots]:
        """Return the slots of each teacher that has some."""
        return self._slots.values()

    async def _look(self, teacher: TeacherSpec) -> None:
        try:
            await self._lists_models(teacher)
        except TeacherError as error:
            logger.info("%s: waiting for its first answer (%s)", teacher.name, error)
        else:
            self._slots[teacher.name].open()

    async def close(self) -> None:
        """Stop waiting for endpoints."""
        for look in self._looks:
            look.cancel()
        if self._looks:
            await asyncio.wait(self._looks)

    def meet(self, teacher: TeacherSpec, outcome: Answer | Failure) -> Failure | None:
        """Check which model answered, and stop paying if it is the wrong one.

        Returns:
            What is wrong with the reply if no chat endpoint or another model sent it.
        """
        name, wrong = teacher.name, None
        if isinstance(outcome, Failure):
            if outcome.code != NO_COMPLETION:
                return None
            wrong = outcome
        elif name not in self._met and not self.is_asked(teacher, outcome.model):
            told = (
                f"{teacher.model} was asked, and the answer is of {outcome.model}; check address and "
                "model, or set the teacher's answers_as to that name"
            )
            wrong = Failure(OTHER_MODEL, told)
        if wrong is None:
            self._n_wrong[name] = 0
            self._met.add(name)
            self._slots[name].open()
        else:
            self._n_wrong[name] += 1
            # With those that are in flight it makes no more than were let go at first.
            self._slots[name].narrow(_N_FIRST - self._n_wrong[name])
        return wrong

    def is_unwelcome(self, teacher: TeacherSpec) -> bool:
        """Return whether the teacher is out because of too many wrong replies in a row."""
        return self._n_wrong[teacher.name] >= _N_FIRST

    def is_asked(self, teacher: TeacherSpec, answered: str | None) -> bool:
        """Return whether an answer comes from the requested model, by its name."""
        price = self._prices.get(teacher.name)
        return is_model(teacher, answered, also=price.canonical_slug if price else None)


def is_model(teacher: TeacherSpec, answered: str | None, *, also: str | None = None) -> bool:
    """Return whether an answer comes from the requested model, by its name.

    Endpoints add a date, a size, or a folder to the name, and may reorder its words
    (`claude-sonnet-4.5` answers as `anthropic/claude-4.5-sonnet-20250929`).

    Args:
        teacher: the teacher that was asked.
        answered: the model's name in the answer, or None.
        also: another name of the model.
    """
    asked = teacher.answers_as or teacher.model
    if not answered or asked == _ANY or _CHOSEN_FOR_YOU.match(asked):
        return True
    names = [asked] if also is None or teacher.answers_as else [asked, also]
    return any(_names(name, answered) for name in names)


def _names(asked: str, answered: str) -> bool:
    core = asked.partition(":")[0].rpartition("/")[2]
    return _words(core) <= _words(answered) or _joined(core) in _joined(answered)


def _words(name: str) -> set[str]:
    return {*re.findall(r"[a-z0-9]+", name.lower())} - {"latest"}


def _joined(name: str) -> str:
    return "".join(re.findall(r"[a-z0-9]+", name.lower()))
