"""States on demand are the very states that a list of them holds."""

import pytest

from replay_pipeline.ingesters import IngestResult, LazyStates, Traces, ingest
from replay_pipeline.ingesters import traces as traces_module
from replay_pipeline.testing.sample import SESSIONS_DIR


@pytest.fixture(scope="module")
def results() -> list[IngestResult]:
    files = sorted(SESSIONS_DIR.rglob("*.jsonl"))
    return [ingest(files[:4]), ingest(files[4:8])]


@pytest.fixture
def parts(results) -> list[Traces]:
    return [
        Traces(sessions=r.sessions, turns=r.turns, states=r.states, tools=r.tools) for r in results
    ]


@pytest.fixture
def whole(parts):
    return [state for part in parts for state in part.materialize()]


def lazily(parts):
    return LazyStates([len(part) for part in parts], lambda i: parts[i])


def test_going_through_them_gives_every_state(parts, whole):
    states = lazily(parts)
    assert len(states) == len(whole) > 20
    assert list(states) == whole


def test_any_order_and_any_number(parts, whole):
    states = lazily(parts)
    for i in [5, 0, len(whole) - 1, -1, 7, 5, -len(whole)]:
        assert states[i] == whole[i]
    assert states[3:9:2] == whole[3:9:2]
    for beyond in (len(whole), -len(whole) - 1):
        with pytest.raises(IndexError):
            states[beyond]


def test_sessions_that_were_closed_are_read_again(parts, whole, monkeypatch):
    monkeypatch.setattr(traces_module, "_MAX_OPEN_CHARS", 1)
    monkeypatch.setattr(traces_module, "_MAX_RECENT", 1)
    for part in parts:
        part._open.clear()
        part._n_open_chars = 0
    states = lazily(parts)
    assert [states[i] for i in range(len(whole) - 1, -1, -1)] == whole[::-1]
    assert all(len(part._open) <= 1 for part in parts)
    assert all(part._n_open_chars == sum(t.n_chars for s in part._open.values() for t in s.values())
               for part in parts)  # fmt: skip


def test_a_part_is_opened_when_it_is_needed(parts):
    opened = []

    def open_part(number):
        opened.append(number)
        return parts[number]

    states = LazyStates([len(part) for part in parts], open_part)
    assert opened == []
    _ = states[len(parts[0])]
    assert opened == [1]


def test_no_states_at_all():
    assert list(LazyStates([], lambda i: pytest.fail("opened"))) == []
