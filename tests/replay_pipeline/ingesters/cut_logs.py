"""Logs that are read while they grow: every trap of the format, and random ones."""

import inspect
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from typer.testing import CliRunner

from replay_pipeline.cli import app
from replay_pipeline.ingesters import ingest
from replay_pipeline.settings import Settings
from replay_pipeline.stages.pipeline import Pipeline
from tests.replay_pipeline.ingesters import test_traps
from tests.replay_pipeline.ingesters.logs import Log, states_of
from tests.replay_pipeline.ingesters.random_log import RandomLog


class _EnoughError(Exception):
    """A test has shown its log."""


def trap_logs() -> dict[str, Log]:
    """The log of each trap, by the name of its test."""
    found: dict[str, Log] = {}

    for name, test in vars(test_traps).items():
        if name.startswith("test_") and list(inspect.signature(test).parameters) == ["states"]:

            def shown(log: Log, *_: Any, name: str = name) -> None:
                found[name] = log
                raise _EnoughError

            with suppress(_EnoughError):
                test(shown)
    return found | {f"random_{seed}": RandomLog(seed, n_turns=12).log for seed in range(8)}


def cuts_of(random: Random, n_bytes: int) -> list[int]:
    """Up to six moments at which a log of this size is read, the last with all there is."""
    return [*sorted(random.randrange(n_bytes + 1) for _ in range(random.randint(1, 6))), n_bytes]


def read_in_steps(log: Log, cuts: Sequence[int], folder: Path) -> dict[str, Any]:
    """What a data root holds after the command line has read the log at each cut."""
    source = folder / "logs" / f"{log.session_id}.jsonl"
    source.parent.mkdir(parents=True)
    root = folder / "root"
    for cut in cuts:
        source.write_bytes(log.bytes[:cut])
        CliRunner().invoke(app, ["ingest", str(source.parent), "--data", str(root)])
    work = Pipeline(Settings(data_dir=root))
    found: dict[str, Any] = {}
    for batch in work.root.batches("states"):
        for state in work.states([batch]):
            assert state["state_id"] not in found, "two batches have one decision"
            found[state["state_id"]] = comparable(state)
    return found


def read_whole(log: Log, folder: Path) -> dict[str, Any]:
    """What one full parse finds."""
    states = states_of(ingest(log.write(folder)))
    return {state["state_id"]: comparable(state) for state in states}


def comparable(state: Any) -> Any:
    """All that does not depend on what else was read: tools are learned as more is seen."""
    left_out = ("tools", "turn_idx")
    return json.loads(json.dumps({k: v for k, v in state.items() if k not in left_out}))
