"""Convert a teacher's recorded token probabilities to the student's tokens.

Two tokenizers can be compared only by bytes. A student's token counts if the teacher wrote a token
with the same bytes at the same place. Elsewhere the teacher's numbers are about another event, so
the position is masked and counted. Within one tokenizer family nearly every token counts, and
across families mostly short and common words.
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
"""For each token, the written one and its alternatives, each as `[token, log-probability]`. A token
is text, or bytes as numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredAnswer:
    """A prompt, a teacher's answer in the trainee's tokens, and the teacher's log-probabilities."""

    prompt_ids: list[int]
    answer_ids: list[int]
    places: list[int]
    """Indexes of answer tokens with the same boundaries in the teacher's tokenizer."""
    support: list[list[int]]
    """For each of these, the ids with a teacher's probability, the written one first."""
    logps: list[list[float]]
    """For each of these, the natural log-probabilities."""


@dataclass
class AnswerReader:
    """The reader that turns rows of `teacher_logprobs` into `ScoredAnswer`s, and counts the rest."""

    renderer: Renderer
    counts: Counter[str] = field(default_factory=Counter)
    """Counts: `tokens` are all tokens of the student, of which `aligned` count. The others are
    counted by reason: `other_cut` (the teacher has no token with these bytes here), `too_long`
    (beyond the budget). `answers_not_lossless` are those of the `answers` that the tokenizer
    doesn't reproduce. `alternatives_unknown` are those of the `alternatives` that aren't a token of
    the student; they stay in the rest."""

    def __post_init__(self) -> None:
        """Spell the vocabulary out in bytes."""
        self._bytes = vocabulary_bytes(self.renderer.tokenizer)
        self._ids: dict[bytes, int] = {}
        for token_id, spelled in self._bytes.items():
            self._ids[spelled] = token_id

    def read(self, rows: Iterable[Mapping[str, Any]]) -> list[ScoredAnswer]:
        """Return the answers with at least one token that counts."""
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
