"""Subagents, resumed and forked sessions and copies of a history are one conversation."""

import gzip
import json
from pathlib import Path

import pytest

from replay_pipeline.ingesters import ingest
from tests.roots import sample_root
from tests.support.conversations import copied, going_on, talk, write_all

ROOT = talk("root")
OTHER = talk("other", start="2026-02-03T08:00:00.000Z")
FORK = copied(ROOT, "fork", says_from=True)
RESUMED = copied(ROOT, "resumed", says_from=False)
OF_FORK = copied(FORK, "fork of the fork", says_from=True)
CONTINUED = going_on(ROOT, "continued")
FAMILY = [ROOT, FORK, RESUMED, OF_FORK, CONTINUED]


def by_session(result):
    rows = result.sessions.to_pylist()
    return {row["session_id"]: row["conversation"] for row in rows}


def test_all_that_goes_on_with_a_session_is_its_conversation(tmp_path):
    write_all([*FAMILY, OTHER], tmp_path)
    result = ingest(tmp_path)
    found = by_session(result)
    agents = [name for name in found if ".agent-" in name]
    assert len(agents) == 2
    assert {found.pop(name) for name in agents} == {ROOT.session_id, OTHER.session_id}
    assert found.pop(OTHER.session_id) == OTHER.session_id
    assert found.keys() < {
        log.session_id for log in FAMILY
    }  # who has nothing of its own has no row
    assert set(found.values()) == {ROOT.session_id}
    for name in ("turns", "states"):
        for row in getattr(result, name).to_pylist():
            assert row["conversation"] == by_session(result)[row["session_id"]]


def test_a_fork_names_its_conversation_without_the_session_that_it_was_forked_from(tmp_path):
    write_all([FORK], tmp_path)
    assert set(by_session(ingest(tmp_path)).values()) == {ROOT.session_id}


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [(ROOT, FORK, RESUMED), (FORK, ROOT, RESUMED), (RESUMED, FORK, ROOT)],
    ids=lambda logs: " ".join(log.name for log in logs),
)
def test_batches_that_come_one_after_the_other_find_the_same_conversation(order, tmp_path):
    """Whichever comes first names it; who comes later joins it."""
    logs = tmp_path / "logs"
    write_all([OTHER], logs)
    work = sample_root(tmp_path / "data", sessions=logs)
    work.ingest_new()
    found = []
    for log in order:
        write_all([log], logs)
        work = sample_root(tmp_path / "data", sessions=logs)
        batch = work.ingest_new()[-1]
        found += [
            row["conversation"]
            for row in work.root.read("states", batch).to_pylist()
            if row["session_id"] != OTHER.session_id
        ]
    assert len(set(found)) == 1
    assert len(work.batches()) == 4


RECORDED = Path(__file__).parents[2] / "data/clients/2.1.330-fork.json.gz"


@pytest.mark.parametrize("reverse", [False, True])
def test_a_fork_by_the_real_client_is_one_conversation(reverse, tmp_path):
    """With each name of a file first: the one that is read first decides nothing."""
    logs = json.loads(gzip.decompress(RECORDED.read_bytes()))["logs"]
    assert len(logs) == 2
    for name in sorted(logs, reverse=reverse):
        lines = [json.dumps(row) for row in logs[name]]
        (tmp_path / name).write_text("\n".join(lines) + "\n", "utf-8")
    found = by_session(ingest(tmp_path))
    assert len(found) == 2
    assert len(set(found.values())) == 1
