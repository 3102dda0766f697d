"""Replicas side by side in one process."""

import threading


def in_threads(one, n):
    """Run `one(rank)` for all ranks at once, to the end; none may fail."""
    errors = []

    def run(rank):
        try:
            one(rank)
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
