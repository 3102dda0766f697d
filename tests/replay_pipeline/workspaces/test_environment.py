"""States as an environment: the program serves them, and the project's own check is the reward."""

import asyncio
import json

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve as listen
from websockets.exceptions import ConnectionClosed

from replay_pipeline.errors import ConfigError
from replay_pipeline.settings import Settings
from replay_pipeline.stages.work.environment import serve_checked
from replay_pipeline.stages.work.workspaces import Workspaces
from replay_pipeline.workspaces import serve
from tests.support.openenv_session import Session, rows_at
from tests.support.small_repository import CHECK, REQUESTS, RIGHT, WRONG, record, served, serving
from tests.trainer.published import write_dataset


@pytest.fixture(scope="module")
def address(box, tmp_path_factory):
    with served(tmp_path_factory.mktemp("served")) as address:
        yield address


def test_the_reward_of_an_episode_is_whether_the_check_passes_at_its_end(address, in_box):
    rows = rows_at(address)
    assert {row["prompt"][0]["content"] for row in rows} == {*REQUESTS}
    session = Session(address)
    assert {tool["name"] for tool in session.tools()} >= {"Read", "Edit", "Bash"}
    session.reset(state_id=rows[0]["state_id"])
    assert session.call("Read", {"file_path": "tide.py"}).text == "     1→HIGH = 3\n     2→"
    wrong = session.call("Edit", {"file_path": "tide.py", **WRONG})
    assert (wrong.reward, wrong.is_done, wrong.is_refused) == (0.0, False, False)
    stale = session.call("Edit", {"file_path": "tide.py", **RIGHT})
    assert (stale.reward, stale.is_refused) == (0.0, True)
    tested = session.call("Bash", {"command": CHECK})
    assert "AssertionError: 5" in tested.text
    assert tested.reward == 0.0
    by_sed = session.call("Bash", {"command": "sed -i 's/5/4/' tide.py"})
    assert (by_sed.reward, by_sed.is_done) == (1.0, True)
    session.close()


def test_each_session_has_files_of_its_own_and_a_reset_begins_anew(address, in_box):
    state_id = rows_at(address)[0]["state_id"]
    one, other = Session(address), Session(address)
    for session in (one, other):
        session.reset(state_id=state_id)
        assert session.call("Edit", {"file_path": "tide.py", **RIGHT}).reward == 1.0
    one.reset(index=1)
    assert "HIGH = 3" in one.call("Read", {"file_path": "tide.py"}).text
    one.close()
    other.close()


def test_what_is_no_message_gets_an_error_and_the_session_goes_on(address, in_box):
    session = Session(address)
    for kind, data in (
        ("step", {"type": "call_tool", "tool_name": "Read"}),
        ("reset", {"state_id": "nothing"}),
        ("reset", {}),
        ("dance", {}),
    ):
        told = session.say(kind, **data)
        assert (told["type"], told["data"]["code"]) == ("error", "VALIDATION_ERROR")
    session.reset(seed=0)
    assert session.call("Fly", {}).is_refused
    session.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"execute": "files", "checks": {"/p": "true"}}, "execute = .commands"),
        ({"execute": "commands"}, "no project has a check"),
    ],
)
def test_without_leave_or_check_nothing_is_served(tmp_path, settings, why):
    record(tmp_path)
    options = Settings.model_validate({"workspaces": settings}).workspaces
    work = Workspaces(Settings(), sources=[tmp_path / "projects"])
    with pytest.raises(ConfigError, match=why):
        serve_checked(
            work, options, host="127.0.0.1", port=0, limit=1, max_calls=1, on_ready=pytest.fail
        )


def test_recorded_states_are_served_with_the_agreement_with_the_consensus_as_reward(tmp_path):
    dataset = write_dataset(tmp_path / "published", n_sessions=2, n_test=1)
    with serving("--dataset", dataset, cwd=tmp_path) as address:
        rows = rows_at(address)
        assert {row["split"] for row in rows} == {"train", "test"}
        session = Session(address)
        assert [tool["name"] for tool in session.tools()] == ["Bash", "Edit", "Read"]
        begun = session.reset(state_id=rows[0]["state_id"])
        assert begun.observation["prompt"] == rows[0]["prompt"]
        [call] = rows[0]["consensus"]["tool_calls"]
        assert session.call("Fly", {}).is_refused
        answer = session.call(call["function"]["name"], json.loads(call["function"]["arguments"]))
        assert (answer.reward, answer.is_done) == (1.0, True)
        assert session.call("Bash", {"command": "ls"}).is_refused
        session.reset(split="test", index=0)
        assert session.call("Bash", {"command": "rm -r build"}).reward == 0.0
        session.close()


def test_a_client_that_asks_nothing_for_long_is_let_go(monkeypatch):
    monkeypatch.setattr(serve, "_MOST_SILENT_S", 0.1)

    async def closed_with() -> str:
        async with listen(serve.Served({}).session, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            async with connect(f"ws://{host}:{port}/ws") as client:
                with pytest.raises(ConnectionClosed):
                    await asyncio.wait_for(client.recv(), 30)
                return client.close_reason or ""

    assert asyncio.run(closed_with()).startswith("silent for")
