"""Scan every text of a batch for secrets, and stop the publication at the first one."""

from collections.abc import Sequence

import pyarrow as pa
import xxhash

from replay_pipeline.errors import PublishError, SecretFoundError
from replay_pipeline.publish import layout
from replay_pipeline.redaction.redactor import SecretHit, find_secrets_in

_SCANNED_AT_ONCE, _MAX_CHARS_AT_ONCE = 2_000, 8_000_000


class SecretScan:
    """The scanner of a batch. It scans equal texts only once, since states of a session share most messages."""

    def __init__(self, batch: str) -> None:
        self._batch = batch
        self._seen: set[int] = set()
        self._texts: list[str] = []
        self._places: list[str] = []
        self._n_chars = 0

    def take(self, rows: pa.Table, config: str) -> None:
        """Collect the texts of rows, and scan many texts at once.

        Raises:
            SecretFoundError: there is a secret.
        """
        names = [
            field.name
            for field in rows.schema
            if pa.types.is_string(field.type)
            or (
                pa.types.is_nested(field.type) and not pa.types.is_integer(field.type.field(0).type)
            )
        ]
        for row in rows.select(names).to_pylist():
            for name, value in row.items():
                for each in value if isinstance(value, list) else [value]:
                    text = layout.json_of(each) if isinstance(each, dict) else each
                    if not isinstance(text, str) or (sha := text_sha(text)) in self._seen:
                        continue
                    self._seen.add(sha)
                    self._texts.append(text)
                    self._n_chars += len(text)
                    place = f"batch {self._batch}, {config}, state {row['state_id']}, {name}"
                    self._places.append(place)
        if len(self._texts) >= _SCANNED_AT_ONCE or self._n_chars >= _MAX_CHARS_AT_ONCE:
            self.finish()

    def finish(self) -> None:
        """Scan the rest of the text."""
        refuse_secrets(self._texts, self._places)
        self._texts, self._places, self._n_chars = [], [], 0


def text_sha(text: str) -> int:
    """Return a fast hash of a text that isn't cryptographically secure."""
    return xxhash.xxh3_64_intdigest(text.encode())


def refuse_secrets(texts: Sequence[str], places: Sequence[str]) -> None:
    """Check texts for secrets. `places` says where each text is.

    Raises:
        SecretFoundError: a text contains a secret.
        PublishError: a text could not be scanned.
    """
    for start in range(0, len(texts), _SCANNED_AT_ONCE):
        try:
            found = find_secrets_in(texts[start : start + _SCANNED_AT_ONCE])
        except Exception as error:  # whatever stops the scanner stops the publication
            where = places[start]
            raise PublishError(f"{where}: could not be scanned for secrets ({error})") from error
        for hits, where in zip(found, places[start:], strict=False):
            if hits:
                _refuse(hits, where)


def _refuse(hits: Sequence[SecretHit], where: str) -> None:
    kinds = ", ".join(sorted({hit.kind for hit in hits}))
    raise SecretFoundError(
        f"{where}: holds a secret ({kinds}); nothing was published. Remove it at its source, "
        "ingest again, and revoke it if it is real"
    )
