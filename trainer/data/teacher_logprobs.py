"""Recorded token probabilities of a teacher, in the tokens of the student.

Two tokenizers meet only in bytes. A token of the student counts where the teacher wrote a token of
the very same bytes at the very same place; everywhere else the teacher's numbers are about another
event, and the position is masked and counted. With one tokenizer family that is nearly every token;
with two it is the short and common words.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.data.alignment import byte_spans, vocabulary_bytes
from trainer.data.budget import sides_of
from trainer.data.rendering import Renderer

TokenLogprobs = Sequence[Sequence[Sequence[Any]]]
"""By token the written one and its alternatives, each as `[token, log-probability]`; a token is its
text, or its bytes as numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredAnswer:
    """A prompt, a teacher's answer in the trainee's tokens, and the teacher's log-probabilities."""

    prompt_ids: list[int]
    answer_ids: list[int]
    places: list[int]
    """Tokens of the answer that the teacher cut alike."""
    support: list[list[int]]
    """By place, ids that the teacher's probabilities are about, the written one first."""
    logps: list[list[float]]
    """By place, their natural log-probabilities."""


@dataclass
class AnswerReader:
    """Turns rows of the dataset's `teacher_logprobs` into `ScoredAnswer`s, and counts the rest."""

    renderer: Renderer
    counts: Counter[str] = field(default_factory=Counter)
    """`tokens`: all tokens of the student; `aligned` of them count; the others by why they do not:
    `other_cut` (no token of the teacher has these bytes here), `too_long` (beyond the budget).
    `answers` and `answers_not_lossless`: the tokenizer does not give a text back as it was.
    `alternatives` and `alternatives_unknown`: no token of the student; they stay in the rest."""

    def __post_init__(self) -> None:
        """Spell the vocabulary out in bytes."""
        self._bytes = vocabulary_bytes(self.renderer.tokenizer)
        self._ids: dict[bytes, int] = {}
        for token_id, spelled in self._bytes.items():
            self._ids[spelled] = token_id

    def read(self, rows: Iterable[Mapping[str, Any]]) -> list[ScoredAnswer]:
        """Return the answers of which at least one token counts."""
        return [answer for row in rows if (answer := self._read(row)) is not None]

    def _read(self, row: Mapping[str, Any]) -> ScoredAnswer | None:
        logprobs: TokenLogprobs = json.loads(row["logprobs"])
        written = [_bytes_of(position[0][0]) for position in logprobs]
        answer = b"".join(written)
        tokenizer: Any = self.renderer.tokenizer
        ids = tokenizer(answer.decode(), add_special_tokens=False)["input_ids"]
        mine = [self._bytes[token_id] for token_id in ids]
        self.counts["answers"] += 1
        if b"".join(mine) != answer:
            self.counts["answers_not_lossless"] += 1
            return None
        places, support, logps = [], [], []
        theirs = {span: number for number, span in enumerate(byte_spans(written))}
        limit = self.renderer.max_response_tokens
        for place, span in enumerate(byte_spans(mine)):
            why = "too_long" if place >= limit else "aligned" if span in theirs else "other_cut"
            self.counts.update(["tokens", why])
            if why == "aligned":
                entries = self._entries(logprobs[theirs[span]], ids[place])
                places.append(place)
                support.append(list(entries))
                logps.append(list(entries.values()))
        if not places:
            return None
        return ScoredAnswer(
            prompt_ids=self.renderer.prompt_ids(
                row["prompt"], row.get("tools"), sides=sides_of(row)
            ),
            answer_ids=ids[:limit],
            places=places,
            support=support,
            logps=logps,
        )

    def _entries(self, position: Sequence[Sequence[Any]], written_id: int) -> dict[int, float]:
        entries = {written_id: float(position[0][1])}
        for token, logp in position[1:]:
            token_id = self._ids.get(_bytes_of(token))
            self.counts["alternatives"] += 1
            if token_id is None or token_id in entries:
                self.counts["alternatives_unknown"] += 1
            else:
                entries[token_id] = float(logp)
        return entries


def _bytes_of(token: str | Sequence[int]) -> bytes:
    return token.encode() if isinstance(token, str) else bytes(token)
