"""Run work in a separate thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(work: Callable[[], Result]) -> "Future[Result]":
    """Start work in a thread that ends with the process. A pool's thread would outlive it."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again by who asks for the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
