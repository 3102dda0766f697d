"""Dagster's records of a data root, and steps in processes of their own, to be stopped and killed."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg

from replay_pipeline.assets.instance import prepare_home
from replay_pipeline.storage.processes import child_environment
from tests.support.dagster_web import sign_in
from tests.support.forked import BIN, forked, forked_python


def instance_of(root: Path) -> dg.DagsterInstance:
    """Dagster's records of a data root, as the product keeps them."""
    return dg.DagsterInstance.from_config(str(prepare_home(root)))


def materialize(
    root: Path, asset: str, *, batch: str | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `dagster asset materialize` on a data root; `options` are those of `Popen`."""
    return subprocess.Popen(
        forked(
            [
                *(BIN / "python", "-m", "dagster", "asset", "materialize"),
                *("-m", "replay_pipeline.assets.definitions", "--select", asset),
                *(("--partition", batch) if batch else ()),
            ],
            children=forked_python(),
        ),
        env=child_environment(DAGSTER_HOME=str(prepare_home(root)), REPLAY_DATA=str(root)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **options,
    )


def wait_until(
    what: Callable[[], object], process: subprocess.Popen[bytes], *, log: Path | None = None
) -> None:
    """Look again and again; fails, with the `log`, if the process ends first or time is up."""
    deadline = time.monotonic() + 300
    while not what():
        is_waiting = process.poll() is None and time.monotonic() < deadline
        assert is_waiting, log and log.read_text()
        time.sleep(0.02)


@contextmanager
def ui_of(
    command: Sequence[str], log: Path, **options: Any
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Where `replay-pipeline ui` serves, once a browser is let in, and its process; `options` are those of `Popen`."""
    with log.open("wb") as lines:
        process = subprocess.Popen(
            command, stdout=lines, stderr=lines, start_new_session=True, **options
        )
        try:
            wait_until(lambda: b"token=" in log.read_bytes(), process, log=log)
            yield sign_in(log), process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
