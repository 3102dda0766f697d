"""Translate the errors of object-store clients into one plain error: what, where, and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from replay_pipeline.errors import StorageError

CHECK = "Check the address, and credentials, endpoint and region in the environment."


@contextmanager
def translated(path: object, what: str) -> Iterator[None]:
    """Turn any error of an object-store client into one plain error.

    Raises:
        FileExistsError: the store says that the object already exists.
        StorageError: the action `what` on `path` failed.
    """
    try:
        yield
    except (FileExistsError, StorageError):
        raise
    except Exception as error:  # each client has a tree of errors of its own
        raise StorageError(
            f"{path}: cannot be {what} ({type(error).__name__}: {error}). {CHECK}"
        ) from error
