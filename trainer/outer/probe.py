"""A replica that trains nothing. It shows that an image has this package and reaches the store."""

import importlib
import os
import sys
import uuid

from trainer.errors import ObjectStoreError, TrainerError
from trainer.outer.object_store import open_store


def probe(uri: str) -> None:
    """Write a test object to the store, read it back, and delete it.

    Raises:
        ObjectStoreError: The store doesn't answer, or returns other bytes.
        TrainerConfigError: The store's package is missing.
    """
    store, key, data = open_store(uri), f"probe/{uuid.uuid4().hex}", os.urandom(64)
    store.put(key, data)
    if store.get(key) != data:
        raise ObjectStoreError(f"{store.place}{key}: other bytes came back than were written")
    store.delete([key])


if __name__ == "__main__":
    # What a replica needs must be there; the room of the outer loop itself knows none of it.
    importlib.import_module("trainer.trl.run")

    try:
        probe(sys.argv[1])
    except TrainerError as error:
        sys.exit(f"error: {error}")
    sys.stdout.write("the package and the store are here\n")
