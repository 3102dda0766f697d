"""What earlier batches have kept, so that deduplication holds across batches.

One file per recipe and batch. A batch knows the batches whose keys sort before its own and no
others, so running any batch again gives the same rows, in whatever order batches are run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.errors import StorageError
from replay_pipeline.tables import readable, written_whole

_SCHEMA = pa.schema([("step", pa.string()), ("key", pa.binary())])


class DedupIndex:
    """The keys that one batch left, and those of the batches before it.

    Args:
        folder: where the index of every recipe and batch lies.
        recipe_sha: `DJNormalizer.recipe.sha`; another recipe has another index.
        batch: key of the batch at hand.
    """

    def __init__(self, folder: Path, *, recipe_sha: str, batch: str) -> None:
        self._folder = folder / recipe_sha
        self._batch = batch

    def earlier(self, step: str) -> Sequence[bytes]:
        """Keys that batches with a smaller key left for a step, in their order.

        Raises:
            StorageError: a file of the index cannot be read.
        """
        keys: list[bytes] = []
        for path in sorted(self._folder.glob("*.parquet")):
            if path.stem < self._batch:
                try:
                    rows = pq.read_table(
                        readable(path), filters=[("step", "=", step)], partitioning=None
                    )
                except (OSError, pa.ArrowInvalid) as error:
                    raise StorageError(
                        f"{path}: not readable ({error}); delete it and normalize batch "
                        f"{path.stem} again"
                    ) from error
                keys += rows["key"].to_pylist()
        return keys

    def save(self, keys: Mapping[str, Sequence[bytes]]) -> None:
        """Replace what this batch left.

        Raises:
            StorageError: the index cannot be written; it is as before.
        """
        rows = [(step, key) for step, step_keys in keys.items() for key in step_keys]
        columns = [pa.array([row[place] for row in rows], _SCHEMA.types[place]) for place in (0, 1)]
        with written_whole(self._folder / f"{self._batch}.parquet") as file:
            pq.write_table(pa.table(columns, schema=_SCHEMA), file, compression="zstd")
