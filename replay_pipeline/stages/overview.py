"""The batches and receipts of a data root, without reading any table.

This module is separate from those that read tables or call endpoints, so that a quick look doesn't
wait for their imports.
"""

from contextlib import suppress
from pathlib import Path

from replay_pipeline.errors import ConfigError
from replay_pipeline.settings import Settings
from replay_pipeline.stages.receipts import Receipts, hash_texts
from replay_pipeline.storage.permissions import tighten_root
from replay_pipeline.storage.root_index import FILE, RootIndex
from replay_pipeline.storage.store import check_reachable, names_of_json

FOLDER = "folder"
"""Key in the report of `publish`: the place of a dataset outside the data root."""


class Overview:
    """The batches of a data root, with their receipts.

    Args:
        settings: the settings of the stages.

    Raises:
        StorageError: the object store with the data root can't be reached.
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
            name = f"index-{hash_texts([str(self.settings.data_dir)])[:8]}.sqlite"
            return self.settings.local_dir() / name
        return None

    def batches(self) -> list[str]:
        """Return the keys of all batches with a manifest, in order.

        The list is cached. `find_batches` and a new `Pipeline` refresh it.
        """
        if self._keys is None:
            self._keys = names_of_json(self.settings.data_dir / "batches")
        return self._keys

    def n_teachers(self) -> int:
        """Return the number of teachers to ask, without those of a rehearsal."""
        is_play = self.settings.played == "rehearsal"
        return len(self.settings.replay.teachers if is_play else self.settings.teachers())

    def forget_batches(self) -> None:
        """Clear the cached list of batches."""
        self._keys = None
