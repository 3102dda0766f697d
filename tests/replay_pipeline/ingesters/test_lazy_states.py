"""States on demand are the very states that a list of them holds."""

from pathlib import Path

import pytest

from replay_pipeline.actions import canonical_action
from replay_pipeline.actions.keys import purpose_of
from replay_pipeline.ingesters import IngestResult, LazyStates, Traces, ingest
from replay_pipeline.ingesters import traces as traces_module
from replay_pipeline.replay.ask.rows import teacher_actions_from_table
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.replay_pipeline.ingesters.logs import Log
from tests.roots import project_root, sample_root


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


def test_teachers_are_asked_only_where_the_prompt_lacks_nothing(tmp_path: Path):
    log = Log()
    log.user("go")
    log.calls("m1", "t1", file_path="a.png")
    log.answers("t1", [{"type": "image", "source": {}}])
    log.says("m2", "a tide")
    log.write(tmp_path / "logs")
    for asks_incomplete, n_asked in ((False, 1), (True, 2)):
        asking = {"sample_teachers": False, "rehearsal_teachers": True}
        work = sample_root(
            tmp_path / "data", sessions=tmp_path / "logs", **asking, asks_incomplete=asks_incomplete
        )
        (batch,) = work.ingest_new() or work.batches()
        assert [s["state_id"] for s in work.asked_states([batch])] == work.root.read(
            "states", batch
        )["state_id"].to_pylist()[:n_asked]
        report = work.replay(batch).report
        assert report["n_states"] == n_asked
        assert report.get("n_states_incomplete", 0) == 2 - n_asked


def test_looks_and_notes_of_the_agent_are_context_by_default(tmp_path: Path):
    """`ask_at`: the sample's states, each counted once; the rows of those asked are as they were."""
    tables = {}
    for ask_at in ("steps", "consequences"):
        work = project_root(tmp_path / ask_at, ask_at=ask_at)
        (batch, *_) = work.ingest_new()
        report = work.replay(batch).report
        left_out = {name: n for name, n in report.items() if name.startswith("n_states_")}
        assert report["n_states"] + sum(left_out.values()) == work.root.n_rows("states", batch)
        tables[ask_at] = work.root.read("teacher_actions", batch)["state_id"].to_pylist()
        if ask_at == "steps":  # everywhere, once: as if nobody knew of looks
            rows = teacher_actions_from_table(work.root.read("teacher_actions", batch))
            assert {row.state_id for row in rows} == {
                *work.root.read("states", batch)["state_id"].to_pylist()
            }
            assert not any(row.looks for row in rows)
            assert not left_out
    assert left_out["n_states_looks"] > 5
    assert set(tables["consequences"]) < set(tables["steps"])
    asked = work.asked_states([batch])
    assert {state["state_id"] for state in asked} == set(tables["consequences"])
    assert all(
        purpose_of(canonical_action(state["student_action"], cwd=state["cwd"])) is None
        for state in asked
    )
