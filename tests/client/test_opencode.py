"""What is read from OpenCode's database, held to what OpenCode sent."""

from pathlib import Path

from replay_pipeline.ingesters import ingest
from tests.client.opencode import OpenCodeDesk, conversation
from tests.replay_pipeline.ingesters.logs import states_of
from tests.replay_pipeline.ingesters.test_opencode_database import plain


def test_every_decision_has_the_messages_that_opencode_sent(tmp_path: Path):
    desk = OpenCodeDesk(tmp_path)
    model = conversation(desk)
    model.close()
    found = ingest(desk.data, redact=False)
    sent = sorted(plain(each["messages"]) for each in model.requests)
    assert len(sent) == 12, desk.said
    assert sorted(plain(state["messages"]) for state in states_of(found)) == sent
    assert found.report.skipped.keys() <= {"bookkeeping"}
