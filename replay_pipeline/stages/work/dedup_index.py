"""The keys of pairs that earlier batches kept, so that deduplication works across batches.

There is one file per recipe and batch. A batch sees only the batches whose keys sort before its
own. So a batch gives the same rows on every run, in any order of batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.errors import StorageError
from replay_pipeline.normalize.memory import Memory
from replay_pipeline.storage.folds import Fold, Kept
from replay_pipeline.storage.store import Place, written_whole
from replay_pipeline.storage.tables import readable

_SCHEMA = pa.schema([("step", pa.string()), ("key", pa.binary())])
_Memories = dict[str, Memory]
_Keys = dict[str, list[bytes]]


@dataclass(frozen=True, slots=True)
class _Left:
    """What batches have left: their keys in order, and memories of them."""

    keys: _Keys
    memories: _Memories


class DedupIndex:
    """The keys that all batches stored under one recipe. Each file is read once per pass.

    Args:
        folder: folder of the files. Every recipe has its own.
        batches: the keys of all batches, sorted.
        start: an empty index for each step, by its label.
        kept: makes a store that outlives the process, from a function that writes and one that reads.
    """

    def __init__(
        self,
        folder: Place,
        *,
        batches: Callable[[], list[str]],
        start: Callable[[], _Memories],
        kept: Callable[[Callable[[_Left], bytes], Callable[[bytes], _Left]], Kept[_Left]]
        | None = None,
    ) -> None:
        self._folder = folder
        self._start = start
        self._fold = Fold(
            batches,
            start=lambda: _Left({}, start()),
            add=self._with_batch,
            kept=kept(_encoded, self._decoded) if kept else None,
        )

    def before(self, batch: str) -> _Memories:
        """Return what is known of earlier batches, by step. It is valid until you ask for another batch.

        Raises:
            StorageError: a file of the index cannot be read.
        """
        return self._fold.before(batch).memories

    def _with_batch(self, left: _Left, batch: str) -> _Left:
        path = self._folder / f"{batch}.parquet"
        try:
            rows = pq.ParquetFile(readable(path)).read()
        except FileNotFoundError:
            return left
        except StorageError:
            raise
        except (OSError, pa.ArrowInvalid) as error:
            raise StorageError(
                f"{path}: not readable ({error}); delete it and normalize batch {batch} again"
            ) from error
        for step, key in zip(rows["step"].to_pylist(), rows["key"].to_pylist(), strict=True):
            left.memories[step].remember(key)
            left.keys.setdefault(step, []).append(key)
        return left

    def _decoded(self, data: bytes) -> _Left:
        left = _Left(msgspec.msgpack.decode(data, type=_Keys), self._start())
        for step, keys in left.keys.items():
            for key in keys:
                left.memories[step].remember(key)
        return left

    def save(self, batch: str, keys: Mapping[str, Sequence[bytes]]) -> None:
        """Replace the entries of a batch.

        Raises:
            StorageError: the file can't be written. It is unchanged.
        """
        rows = [(step, key) for step, step_keys in keys.items() for key in step_keys]
        columns = [pa.array([row[place] for row in rows], _SCHEMA.types[place]) for place in (0, 1)]
        with written_whole(self._folder / f"{batch}.parquet") as file:
            pq.write_table(pa.table(columns, schema=_SCHEMA), file, compression="zstd")
        self._fold.forget(batch)


def _encoded(left: _Left) -> bytes:
    return msgspec.msgpack.encode(left.keys)
