"""What teachers agree on after looks of their own: a pair if it needs nothing that they saw, else a lesson."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from replay_pipeline.judge.records import (
    continuation_rows,
    outcomes_table,
    pairs_table,
    positives_table,
)
from replay_pipeline.judge.vain import looked_in_vain
from replay_pipeline.storage.pair_rows import with_prompts
from replay_pipeline.types import Look, LookAnswer, TeacherAction
from tests.support.looking import call
from tests.support.votes import extract_pairs

EDIT = call("Edit", file_path="/w/tide/high.py", old_string="return 3", new_string="return 4")
READ = Look(
    action=call("Read", file_path="/w/tide/high.py"),
    answers=(LookAnswer(text="     1→def high():\n     2→    return 3", source="files"),),
    request_sha="0",
)
STATE = {
    "state_id": "s1",
    "session_id": "a",
    "cwd": "/w",
    "messages": [{"role": "user", "content": "High water is 4, mend tide/high.py."}],
    "student_action": call("Bash", command="make install"),
}


def judged(action, *looks, state=STATE):
    rows = [
        TeacherAction(state_id="s1", teacher=name, model=f"{name}/x", action=action, looks=of)
        for name, of in zip(("qwen", "glm", "kimi"), looks, strict=True)
    ]
    report = extract_pairs([state], rows)
    return report, outcomes_table(report.outcomes).to_pylist()[0]["outcome"]


def test_an_edit_of_what_only_the_teacher_has_read_is_a_lesson_with_its_looks_in_the_prompt():
    report, outcome = judged(EDIT, (READ,), (READ, READ), (READ,))
    assert outcome == "lesson"
    assert report.pairs == []
    table = positives_table(report.positives)
    [row] = table.to_pylist()
    assert (row["kind"], row["n_looks"]) == ("lesson", 1)
    assert json.loads(row["looks_json"]) == READ.messages()
    [full] = with_prompts(table, lambda _: [STATE])
    messages = json.loads(full["state_messages_json"][0].as_py())
    assert messages == [*STATE["messages"], *READ.messages()]


def test_looks_of_which_some_had_no_answer_make_no_lesson():
    lost = replace(
        READ, answers=(*READ.answers, LookAnswer(text="Not available", source="unknown"))
    )
    assert judged(EDIT, (lost,), (lost,), (lost,))[1] == "infeasible"
    assert judged(EDIT, (lost,), (READ, READ), (lost,))[1] == "lesson"
    step = TeacherAction(
        state_id="s1", teacher="qwen", model="q/x", action=EDIT, looks=(lost,), n_after=1
    )
    assert continuation_rows([STATE], [step]) == []
    assert continuation_rows([STATE], [replace(step, looks=(READ,))])


def test_without_looks_it_is_infeasible_and_with_them_in_the_agents_prompt_a_pair():
    assert judged(EDIT, (), (), ())[1] == "infeasible"
    shown = {**STATE, "messages": [*STATE["messages"], *READ.messages()]}
    report, outcome = judged(EDIT, (READ,), (READ, READ), (), state=shown)
    assert outcome == "pair"
    assert "n_looks" not in report.pairs[0]
    report, _ = judged(EDIT, (READ,), (READ, READ), (READ,), state=shown)
    assert pairs_table(report.pairs)["n_looks"].to_pylist() == [1]


@pytest.mark.parametrize("answer", ["     1→def high():\n     2→    return 5", "gone"])
def test_looks_that_did_not_show_it_make_nothing_of_it(answer):
    other = Look(
        action=READ.action, answers=(LookAnswer(text=answer, source="log"),), request_sha="1"
    )
    report, outcome = judged(EDIT, (other,), (other,), (other,))
    assert outcome == "infeasible"
    assert not report.positives
    assert positives_table([]).schema.field("n_looks").type == pa.int32()


def test_looks_in_vain_are_told_from_others_until_the_agent_acts_or_is_spoken_to():
    def after(*steps):
        messages = [message for look, shown in steps for message in (look, result(shown))]
        return looked_in_vain({**STATE, "messages": [*STATE["messages"], *messages]})

    def result(text):
        return {"role": "tool", "tool_call_id": "call_1", "content": text}

    read, search = READ.action, call("Grep", pattern="high")
    listed = call("Bash", command="ls -la missing")
    assert after((read, "a"), (read, "b"), (read, "c"))
    assert after((search, "No matches found"), (read, "a"))
    assert after((listed, "(Bash completed with no output)"))
    assert not after((read, "a"), (read, "b"), (search, "high.py:1"))
    assert not after((read, "a"), (read, "b"), (EDIT, "updated"), (read, "c"))
    assert not after((search, "No matches found"), (EDIT, "updated"), (read, "c"))
    assert not after()
