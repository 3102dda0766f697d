"""What holds for every log, however it was written, cut or damaged."""

import json
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from replay_pipeline.errors import IngestError
from replay_pipeline.ingesters import IngestReport, IngestResult, ingest, write_traces
from replay_pipeline.ingesters.base import Turn
from replay_pipeline.ingesters.log_rows import state_id_of
from replay_pipeline.types import TraceState
from tests.replay_pipeline.ingesters.logs import assert_results_follow_their_calls, states_of
from tests.replay_pipeline.ingesters.random_log import RandomLog

pytestmark = pytest.mark.slow

SEEDS = st.integers(0, 10**9)
FEW = settings(max_examples=15, deadline=None)


def state_id(message_id: str) -> str:
    return state_id_of(Turn(None, "assistant", 0, "", message_id=message_id))


def states_in(results: Iterable[IngestResult]) -> dict[str, TraceState]:
    """Every state, as the last result has it."""
    found: dict[str, TraceState] = {}
    for result in results:
        states = states_of(result)
        by_id = {state["state_id"]: state for state in states}
        assert len(by_id) == len(states)
        found |= by_id
    return found


def assert_every_row_is_accounted_for(report: IngestReport) -> None:
    assert report.rows == report.rows_used + sum(report.skipped.values()), report


@FEW
@given(SEEDS)
def test_prefix_and_action_of_every_state_are_the_true_ones(seed: int):
    made = RandomLog(seed)
    with TemporaryDirectory() as folder:
        result = ingest(made.log.write(Path(folder)), redact=False)
    found = states_in([result])
    assert found.keys() == {state_id(m) for m in made.truth}
    for message_id, turn in made.truth.items():
        state = found[state_id(message_id)]
        assert state["messages"][1:] == turn.prefix()
        actual = state["student_action"]
        for call in actual.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
        assert actual == turn.messages[0]
        assert_results_follow_their_calls(state["messages"])
    assert_every_row_is_accounted_for(result.report)


@pytest.mark.slow
def test_a_log_cut_at_any_byte_is_read_without_an_exception():
    made = RandomLog(3, n_turns=2)
    data = made.log.bytes
    whole = {state_id(m) for m in made.truth}
    ends = [at for at, byte in enumerate(data) if byte == ord("\n")]
    # Every byte around the ends of rows, and every 17th within them.
    cuts = {*range(0, len(data), 17), *(at + i for at in (0, *ends) for i in range(-2, 4))}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "s.jsonl"
        last = 0
        for cut in sorted(cuts & {*range(len(data) + 1)}):
            path.write_bytes(data[:cut])
            try:
                result = ingest(path, redact=False)
            except IngestError:
                assert cut < 400
                continue
            assert_every_row_is_accounted_for(result.report)
            found = states_in([result])
            assert found.keys() <= whole
            assert len(found) >= last
            last = len(found)
            for state in found.values():
                assert_results_follow_their_calls(state["messages"])


def mutated(line: bytes, random: Random) -> bytes:
    """A row with some of its values swapped for others, or its bytes damaged."""
    if random.random() < 0.3:
        data = bytearray(line)
        for _ in range(random.randint(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
        return bytes(data)
    values: list[Any] = [
        None,
        True,
        0,
        -1.5,
        "",
        "x",
        [],
        {},
        [None],
        {"a": [1]},
        "a" * 99,
        1 << 70,
    ]
    row = json.loads(line)

    def spoil(value: Any) -> None:
        if isinstance(value, dict) and value:
            key = random.choice(list(value))
            if random.random() < 0.5:
                spoil(value[key])
            elif random.random() < 0.3:
                del value[key]
            else:
                value[key] = deepcopy(random.choice(values))
        elif isinstance(value, list) and value:
            i = random.randrange(len(value))
            if random.random() < 0.5:
                spoil(value[i])
            else:
                value[i] = deepcopy(random.choice(values))

    for _ in range(random.randint(1, 3)):
        spoil(row)
    return json.dumps(row).encode() + b"\n"


@settings(max_examples=40, deadline=None)
@given(SEEDS)
@example(317490995)  # a list where the kind of an attachment stands
def test_no_damage_to_rows_leaves_the_ingester_as_an_exception(seed: int):
    random = Random(seed)
    made = RandomLog(seed % 50, n_turns=10)
    lines = [
        mutated(line, random) if random.random() < 0.5 else line
        for line in made.log.lines
        if random.random() > 0.03
    ]
    random.shuffle(lines) if random.random() < 0.1 else None
    with TemporaryDirectory() as folder:
        path = Path(folder) / "s.jsonl"
        path.write_bytes(b"".join(lines))
        try:
            result = ingest(path)
        except IngestError:
            return
        write_traces(result, Path(folder) / "out")
    assert_every_row_is_accounted_for(result.report)
    for state in states_in([result]).values():
        assert_results_follow_their_calls(state["messages"])
        json.dumps(state).encode()


def test_a_session_of_any_length_is_let_go():
    turn = None
    for i in range(300_000):
        turn = Turn(turn, "user", i, str(i))
    del turn
