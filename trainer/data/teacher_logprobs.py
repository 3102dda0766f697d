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
from itertools import accumulate, pairwise
from typing import Any

from trainer.data.budget import sides_of
from trainer.data.rendering import Renderer

TokenLogprobs = Sequence[Sequence[Sequence[Any]]]
"""By token the written one and its alternatives, each as `[token, log-probability]`; a token is its
text, or its bytes as numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredAnswer:
    """A prompt, a teacher's answer in the student's tokens, and what the teacher gave to choose."""

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
        """Give the answers of which at least one token counts."""
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
        theirs = {span: number for number, span in enumerate(_spans(written))}
        limit = self.renderer.max_response_tokens
        for place, span in enumerate(_spans(mine)):
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


def _spans(tokens: Sequence[bytes]) -> list[tuple[int, int]]:
    """First and last byte of each token; an empty one has no place of its own."""
    return list(pairwise(accumulate(map(len, tokens), initial=0)))


def vocabulary_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Spell each token of a fast tokenizer out in the bytes that it stands for.

    Of several for the same bytes the one that a tokenizer writes comes last: no token of a single
    byte that stands in for a character, and the one learned first.

    Byte-level tokenizers write a byte as a printable character, SentencePiece a blank as `▁` and a
    byte that is no character as `<0xNN>`.

    Source: GPT-2's `bytes_to_unicode`; the `ByteLevel`, `Metaspace` and `ByteFallback` decoders of
    the library tokenizers.
    """
    backend = tokenizer.backend_tokenizer
    is_byte_level = "ByteLevel" in repr(backend.decoder)
    added = backend.get_added_tokens_decoder()
    learned = backend.get_vocab(with_added_tokens=False)
    order = sorted(learned, key=lambda token: (not _is_byte(token), -learned[token]))
    spelled = {
        learned[token]: _byte_level(token) if is_byte_level else _sentence_piece(token)
        for token in order
        if learned[token] not in added
    }
    return spelled | {token_id: token.content.encode() for token_id, token in added.items()}


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + number): byte for number, byte in enumerate(_OTHERS)}


def _byte_level(token: str) -> bytes:
    return bytes(_BYTES[char] for char in token)


def _sentence_piece(token: str) -> bytes:
    if _is_byte(token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x")
