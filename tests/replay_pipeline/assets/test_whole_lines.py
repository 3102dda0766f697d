"""Messages of a trainer are read whole, however its writes are cut."""

import json
import time
from pathlib import Path

from replay_pipeline.assets.whole_lines import WholeLineReader


class Handler:
    def __init__(self) -> None:
        self.heard: list[dict] = []
        self.faults: list[str] = []

    def handle_message(self, message: dict) -> None:
        self.heard.append(message)

    def report_pipes_framework_exception(self, origin: str, exc_info: tuple) -> None:
        self.faults.append(str(exc_info[1]))


def test_a_line_that_is_half_written_is_waited_for():
    handler = Handler()
    messages = [{"method": "log", "step": n} for n in range(3)]
    with WholeLineReader().read_messages(handler) as params:
        for message in messages:
            text = json.dumps(message) + "\n"
            for part in (text[:15], text[15:]):
                with Path(params["path"]).open("a", encoding="utf-8") as file:
                    file.write(part)
                time.sleep(0.05)
    assert handler.heard == messages
    assert handler.faults == []


def test_the_last_messages_are_read_at_the_end_and_a_bad_one_loses_no_other():
    handler = Handler()
    with WholeLineReader().read_messages(handler) as params:
        Path(params["path"]).write_text('{"method": "a"}\nno JSON\n{"method": "b"}\n')
    assert [message["method"] for message in handler.heard] == ["a", "b"]
    assert len(handler.faults) == 1
