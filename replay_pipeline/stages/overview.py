"""What a data root says of itself without a look at a table: its batches and receipts.

Apart from everything that reads tables or asks somebody, so that who only looks waits for no import
of those.
"""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from replay_pipeline.errors import ConfigError
from replay_pipeline.settings import Settings
from replay_pipeline.stages.receipts import Receipts
from replay_pipeline.storage.permissions import tighten_root
from replay_pipeline.storage.root_index import FILE, RootIndex
from replay_pipeline.storage.store import check_reachable, names_of_json

FOLDER = "folder"
"""In the report of `publish`: the place of a dataset that was put elsewhere than into the data root."""


class Overview:
    """The batches of a data root, with their receipts.

    Args:
        settings: everything the stages are told.

    Raises:
        StorageError: the data root is on an object store that cannot be reached.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        check_reachable(settings.data_dir)
        tighten_root(settings.data_dir)
        self.index = RootIndex(settings.data_dir, self._index_file())
        self.receipts = Receipts(settings.data_dir, self.index)
        self._keys: list[str] | None = None

    def _index_file(self) -> Path | None:
        """Return where the index of the root lies; `None` if this machine has no folder for it."""
        if isinstance(self.settings.data_dir, Path):
            return self.settings.data_dir / FILE
        with suppress(ConfigError):
            name = f"index-{hash_of([str(self.settings.data_dir)])[:8]}.sqlite"
            return self.settings.local_dir() / name
        return None

    def batches(self) -> list[str]:
        """Return keys of all batches that have a manifest, in order.

        They are listed once; `find_batches` looks again, and so does a new `Pipeline`.
        """
        if self._keys is None:
            self._keys = names_of_json(self.settings.data_dir / "batches")
        return self._keys

    def n_teachers(self) -> int:
        """Return the number of teachers to ask. Those of a rehearsal don't count."""
        is_play = self.settings.played == "rehearsal"
        return len(self.settings.replay.teachers if is_play else self.settings.teachers())

    def forget_batches(self) -> None:
        """Look for the batches again when they are asked for next."""
        self._keys = None


def hash_of(parts: Iterable[str]) -> str:
    """Hash texts in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()
