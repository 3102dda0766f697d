"""Record a dataset as an older version of this program publishes it: its splits cut conversations.

    git archive 450b4e6 | tar x -C OLD && cd OLD && PYTHONPATH=. python RECORD.py dataset_of_layout_2

That version hashed the id of a session, and a subagent has one of its own. Of three sessions, two
have a subagent whose task stands word for word in the prompts of the session that started it; one
subagent is on the side of its session and one is not.
"""

import json
import sys
from pathlib import Path
from typing import Any

from replay_pipeline.publish import publish
from tests.full_tables import full_table
from tests.replay_pipeline.publish.conftest import call_message, kept_row, positive_row

TEST_FRACTION = 0.24
CUT = "5d9b6b43-0c1f-5e0a-9c58-4f5f0f6a7b01"
WHOLE = "9a0f3f52-6d0e-5d0b-8a55-2b1c7c3e4d02"
ALONE = "c3e1d7a4-2b9f-5c6d-9e70-1a2b3c4d5e03"
TASKS = {
    CUT: "Find every caller of `parse_ledger` in the tree and write down for each of them which "
    "of the two return values it reads, whether it checks for None before it does so, and in which "
    "test it is covered. Change nothing. End with a table of file, line, value and test.",
    WHOLE: "Read the three migrations of the schema in their order and say which columns are "
    "written by none of the importers that are left in the tree. Look at the queries of the report "
    "as well, since two of them name columns in strings. End with one line for each such column.",
}


def row(number: int, session: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return kept_row(number, session=session) | {"state_messages_json": json.dumps(messages)}


def rows_of(session: str, start: int) -> list[dict[str, Any]]:
    """Two states of a session that hands out a task, and two of the subagent that has it."""
    task = TASKS[session]
    request = {"role": "user", "content": f"The import of project {start} is slow. Find out why."}
    handed_out = [
        request,
        call_message("Task", description="look", prompt=task),
        {"role": "tool", "tool_call_id": "call_1", "content": "A table of four lines."},
    ]
    taken = [{"role": "user", "content": task}]
    agent = f"{session}.agent-a{start}"
    return [
        row(start, session, handed_out),
        row(start + 1, session, [*handed_out, {"role": "user", "content": "Go on."}]),
        row(start + 2, agent, taken),
        row(start + 3, agent, [*taken, {"role": "assistant", "content": "I begin."}]),
    ]


def main(folder: str) -> None:
    alone = [kept_row(number, session=ALONE) for number in (20, 21)]
    batches = {
        "b1": [*rows_of(CUT, 0)[:3], *alone],
        "b2": [*rows_of(WHOLE, 10), rows_of(CUT, 0)[3]],
    }
    publish(
        [(key, full_table(rows, "normalized_pairs")) for key, rows in batches.items()],
        positives=[("b1", full_table([positive_row(30, session=CUT)], "positives"))],
        folder=Path(folder),
        test_fraction=TEST_FRACTION,
        lengths=[8_192],
    )


if __name__ == "__main__":
    main(sys.argv[1])
