"""Texts of clients (system prompts, reminders, tools) in a file next to the dataset, each only once.

These texts belong to the makers of the clients. Rows have the neutral form instead, and name the
texts by hash. So you can train on a dataset without the file, and with it you get every prompt as
its client sent it.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.publish import layout
from replay_pipeline.publish.secret_scan import refuse_secrets

_HASH_CHARS = 32


class ClientTextTable:
    """The texts of a batch, by hash."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._rows = {row["hash"]: row for row in rows}

    def keep(self, text: Mapping[str, Any]) -> str:
        """Store a text, and return its hash."""
        data = msgspec.json.encode(text, order="sorted")
        name = hashlib.sha256(data).hexdigest()[:_HASH_CHARS]
        self._rows.setdefault(name, {"hash": name, **text})
        return name

    def write(self, folder: Path, batch: str, used: Collection[str]) -> dict[str, Path]:
        """Write the texts that rows name, and return the file by its path in the dataset.

        Raises:
            SecretFoundError: a text contains a secret.
        """
        rows = [self._rows[name] for name in sorted(used) if name in self._rows]
        if not rows:
            return {}
        for row in rows:
            texts = [row["tools"] or "", *(layout.json_of(each) for each in row["messages"])]
            refuse_secrets(texts, [f"batch {batch}, texts of clients, {row['hash']}"] * len(texts))
        file = folder / batch / layout.CLIENT_TEXTS
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            pa.Table.from_pylist(rows, schema=layout.CLIENT_TEXT), file, compression="zstd"
        )
        name = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        return {f"{layout.CLIENT_TEXTS}/{batch}/{name}.parquet": file}


def texts_in(dataset: Path, batch: str = "*") -> dict[str, dict[str, Any]]:
    """Return the texts in a dataset folder by hash, for one batch or for all."""
    files = sorted(dataset.glob(f"{layout.CLIENT_TEXTS}/{batch}/*.parquet"))
    rows = (row for file in files for row in pq.ParquetFile(file).read().to_pylist())
    return {row["hash"]: row for row in rows}
