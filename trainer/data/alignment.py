"""Align two tokenizers on one text: which tokens cover the same bytes, and which tokens they share.

Tokens of two tokenizers can be compared only by bytes. A group of tokens ends where both tokenizers
have a boundary. Mostly it is one token on each side, and sometimes several that are the same text
only together. The probability of a group is the product of its tokens' probabilities.

Source: GOLD, "Unlocking On-Policy Distillation for Any Model Family", Hugging Face 2025 (alignment by
text, the chain rule within a group, tokens matched by what they spell), after ULD, arXiv:2402.12030.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

__all__ = ["AlignedAnswer", "TokenAlignment", "byte_spans", "vocabulary_bytes"]

Group = tuple[range, range]
"""Indexes of the first tokenizer's tokens, and of the second's, that are the same text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignedAnswer:
    """An answer in the tokens of a second tokenizer."""

    ids: list[int]
    """Its tokens in the second tokenizer. Empty if that tokenizer doesn't reproduce the text."""
    groups: list[Group]


@dataclass
class TokenAlignment:
    """Two tokenizers and the tokens that they share."""

    mine: Any
    """A fast tokenizer. Its `eos_token` ends a turn."""
    theirs: Any
    is_same: bool = field(init=False)
    """Whether both tokenizers give equal ids to equal tokens."""
    common: list[tuple[int, int]] = field(init=False, repr=False)
    """Ids, in both tokenizers, of the tokens with the same bytes, and of the end of a turn."""

    def __post_init__(self) -> None:
        """Spell both vocabularies out in bytes."""
        self.is_same = self.mine.get_vocab() == self.theirs.get_vocab()
        self._my_bytes = vocabulary_bytes(self.mine)
        self._their_bytes = self._my_bytes if self.is_same else vocabulary_bytes(self.theirs)
        if self.is_same:
            self.common = [(token_id, token_id) for token_id in sorted(self._my_bytes)]
            return
        here, there = _by_bytes(self.mine), _by_bytes(self.theirs)
        pairs = {here[spelled]: there[spelled] for spelled in here.keys() & there.keys()}
        pairs[self.mine.eos_token_id] = self.theirs.eos_token_id
        self.common = sorted(pairs.items())

    def answer(self, ids: Sequence[int]) -> AlignedAnswer:
        """Tokenize an answer of the first tokenizer with the second, and group tokens with the same bytes.

        A model may write bytes that aren't text. These bytes and everything after them are in no
        group.
        """
        if self.is_same:
            places = range(len(ids))
            return AlignedAnswer(
                ids=list(ids), groups=[(range(i, i + 1), range(i, i + 1)) for i in places]
            )
        has_end = bool(ids) and ids[-1] == self.mine.eos_token_id
        mine = [self._my_bytes.get(i, b"") for i in ids[: len(ids) - has_end]]
        written = b"".join(mine)
        text = _text_of(written)
        theirs = list(self.theirs(text, add_special_tokens=False)["input_ids"])
        spelled = [self._their_bytes.get(i, b"") for i in theirs]
        if b"".join(spelled) != text.encode():
            return AlignedAnswer(ids=[], groups=[])
        groups = list(_groups(byte_spans(mine), byte_spans(spelled)))
        if has_end and len(text.encode()) == len(written):
            groups.append((range(len(mine), len(mine) + 1), range(len(theirs), len(theirs) + 1)))
            theirs.append(self.theirs.eos_token_id)
        return AlignedAnswer(ids=theirs, groups=groups)


def _text_of(written: bytes) -> str:
    """Return the text that bytes begin with, up to the first that is none."""
    try:
        return written.decode()
    except UnicodeDecodeError as error:
        return written[: error.start].decode()


def _groups(mine: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]) -> Iterator[Group]:
    """Close a group wherever both have a boundary: the side whose token ends earlier goes on."""
    my_start = their_start = here = there = 0
    while here < len(mine) and there < len(theirs):
        my_end, their_end = mine[here][1], theirs[there][1]
        here += my_end <= their_end
        there += their_end <= my_end
        if my_end == their_end:
            yield range(my_start, here), range(their_start, there)
            my_start, their_start = here, there


def byte_spans(tokens: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return the first and last byte of each token."""
    return list(pairwise(accumulate(map(len, tokens), initial=0)))


def _by_bytes(tokenizer: Any) -> Mapping[bytes, int]:
    """Return ids by what they spell, of tokens that stand for text and not for structure."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    structure = {token_id for token_id, token in added.items() if token.special}
    spelled = vocabulary_bytes(tokenizer).items()
    return {text: token_id for token_id, text in spelled if token_id not in structure}


def vocabulary_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Return the bytes of each token of a fast tokenizer.

    If several tokens have the same bytes, the one that the tokenizer writes comes last. That is the
    token that was learned first, and not a single-byte fallback.

    Byte-level tokenizers write a byte as a printable character. SentencePiece writes a blank as
    `▁`, and a byte that isn't a character as `<0xNN>`.

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
