"""Messages of a process that runs under Dagster Pipes, read line by line."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import dagster as dg

_WAIT_S = 0.01


class WholeLineReader(dg.PipesMessageReader):
    """Read messages from a temporary file, each when its line has ended.

    Dagster's own reader takes what it sees of a line for the whole line if it reads while the line is
    written. Then it stops, and later messages are lost.
    """

    @contextmanager
    def read_messages(self, handler: dg.PipesMessageHandler) -> Iterator[dict[str, Any]]:
        """Hand messages to `handler` while the session is open, and the last ones at its end."""
        with TemporaryDirectory() as folder:
            (path := Path(folder) / "messages").touch()
            is_closed = Event()
            thread = Thread(target=_read, args=(path, handler, is_closed), daemon=True)
            thread.start()
            try:
                yield {"path": str(path)}  # as the default writer of Pipes takes it
            finally:
                is_closed.set()
                thread.join()

    def no_messages_debug_text(self) -> str:
        """Return where messages were looked for."""
        return "Attempted to read messages from a local temporary file."


def _read(path: Path, handler: dg.PipesMessageHandler, is_closed: Event) -> None:
    line = ""
    with path.open(encoding="utf-8") as file:
        while True:
            was_closed = is_closed.is_set()
            line += (part := file.readline())
            if line.endswith("\n"):
                try:
                    handler.handle_message(json.loads(line))
                except (ValueError, dg.DagsterError):
                    where = "reader of the trainer's messages"
                    handler.report_pipes_framework_exception(where, sys.exc_info())
                line = ""
            elif not part:
                if was_closed:
                    return
                is_closed.wait(_WAIT_S)
