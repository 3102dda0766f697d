"""What a client of an object store raises, as one plain error: what, where, what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from replay_pipeline.errors import StorageError

CHECK = "Check the address, and credentials, endpoint and region in the environment."


@contextmanager
def translated(path: object, what: str) -> Iterator[None]:
    """Turn whatever the client of an object store raises into one plain error.

    Raises:
        FileExistsError: the store answers that there is such an object already.
        StorageError: `path` cannot be `what`.
    """
    try:
        yield
    except (FileExistsError, StorageError):
        raise
    except Exception as error:  # each client has a tree of errors of its own
        raise StorageError(
            f"{path}: cannot be {what} ({type(error).__name__}: {error}). {CHECK}"
        ) from error
