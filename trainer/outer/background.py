"""Work on a thread of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(work: Callable[[], Result]) -> "Future[Result]":
    """Begin to work on a thread that does not outlive the process, as a pool's would."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again by who asks for the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
