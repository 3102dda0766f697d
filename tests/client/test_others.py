"""What is read from the logs of other agents, held to what they sent."""

from pathlib import Path

import pytest

from replay_pipeline.ingesters import ingest
from tests.client.others import AGENTS, OtherDesk
from tests.replay_pipeline.ingesters.logs import states_of
from tests.replay_pipeline.ingesters.test_opencode_database import plain

NOT_IN_THE_LOG = {
    # Two messages with which every request begins, and the words of an error.
    "qwen_code": ("This is the Qwen Code.", "Got it. Thanks for the context!"),
    "copilot": ("does not exist",),
    "pi": (),
}
LOGS = {"qwen_code": ".qwen", "copilot": ".copilot", "pi": ".pi"}


@pytest.mark.parametrize("agent", AGENTS)
def test_every_decision_has_the_messages_that_were_sent(agent: str, tmp_path: Path):
    desk = OtherDesk(tmp_path)
    model = desk.have(agent)
    found = ingest(desk.home / LOGS[agent], redact=False)
    assert found.sessions["agent"].to_pylist() == [agent], desk.said
    assert not [reason for reason in found.report.skipped if reason.startswith("unknown")]
    read = [_known(agent, state["messages"]) for state in states_of(found)]
    assert len(model.requests) == 3
    assert read == [_known(agent, each["messages"]) for each in model.requests]


def _known(agent: str, messages: list[dict]) -> list:
    found = plain([message for message in messages if message["role"] != "developer"])
    return [each for each in found if not any(text in each[1] for text in NOT_IN_THE_LOG[agent])]
