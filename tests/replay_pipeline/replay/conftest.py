import pytest

from replay_pipeline.types import RetryPolicy
from tests.postgres import fresh_database, running_postgres
from tests.support.nursery import nursery
from tests.support.teachers import TeacherServer

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
    with running_postgres() as running:
        yield running


@pytest.fixture
def postgres_url(postgres_server):
    return fresh_database(postgres_server)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path):
    """A ledger in each kind of database."""
    if request.param == "sqlite":
        return str(tmp_path / "ledger.sqlite")
    return request.getfixturevalue("postgres_url")


@pytest.fixture(scope="module")
def children():
    with nursery() as running:
        yield running
