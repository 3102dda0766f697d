"""The teachers' answers with token probabilities, as rows of a separate config."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa

from replay_pipeline.publish.layout import TEACHER_LOGPROBS
from replay_pipeline.redaction.redactor import find_secrets_in
from replay_pipeline.types import TokenLogprobs

_DECODER = msgspec.json.Decoder(TokenLogprobs)


@dataclass
class ScoredAnswers:
    """The answers of a batch that have token probabilities, by state and teacher."""

    logprobs: Mapping[tuple[str, str], str]
    """JSON of `TokenLogprobs`."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of consensus answers without a row, by reason."""
    _seen: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def of(cls, table: pa.Table) -> "ScoredAnswers":
        """Read the rows of a table `token_logprobs`."""
        places = zip(table["state_id"].to_pylist(), table["teacher"].to_pylist(), strict=True)
        return cls(dict(zip(places, table["logprobs_json"].to_pylist(), strict=True)))

    def rows(self, states: pa.Table) -> pa.Table:
        """Return the answers behind these rows of `pairs` or `positives`, each only once.

        The text joins the teacher's tokens, because only there a secret that is split into tokens
        shows. An answer with a secret, or with bytes that aren't text, is left out and counted.
        """
        found, texts = [], []
        for row in states.to_pylist():
            for teacher in row["teachers_agreeing"] or ():
                place = row["state_id"], teacher
                if place in self._seen:
                    continue
                self._seen.add(place)
                text = _text_of(self.logprobs.get(place))
                if isinstance(text, str):
                    scored = {"teacher": teacher, "logprobs": self.logprobs[place]}
                    found.append(row | scored | {"answer": text})
                    texts.append(text)
                else:
                    self.left_out["no_text" if place in self.logprobs else "not_sent"] += 1
        hits = find_secrets_in(texts)
        kept = [row for row, of_text in zip(found, hits, strict=True) if not of_text]
        self.left_out.update(["secret"] * (len(found) - len(kept)))
        columns = {
            name: pa.array([row.get(name) for row in kept], kind)
            for name, kind in zip(TEACHER_LOGPROBS.names, TEACHER_LOGPROBS.types, strict=True)
        }
        return pa.table(columns, schema=TEACHER_LOGPROBS)


def _text_of(logprobs: str | None) -> str | None:
    """Join the written tokens of an answer; `None` where they are not text."""
    if logprobs is None:
        return None
    written = (position[0][0] for position in _DECODER.decode(logprobs))
    joined = b"".join(t.encode() if isinstance(t, str) else bytes(t) for t in written)
    try:
        return joined.decode()
    except UnicodeDecodeError:
        return None
