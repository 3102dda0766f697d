from replay_pipeline.replay.ask.rows import teacher_actions_from_table, teacher_actions_table
from replay_pipeline.types import TeacherAction

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "Read", "arguments": '{"file_path": "ä.py"}'},
}
ANSWERED = TeacherAction(
    state_id="s1",
    teacher="b",
    action={"role": "assistant", "content": "look", "tool_calls": [CALL]},
    model="v/b",
    family="v",
    cost_usd=0.25,
    n_prompt_tokens=10,
    is_distillable=True,
)
TEXT = TeacherAction(state_id="s1", teacher="a", action={"role": "assistant", "content": ""})
FAILED = TeacherAction(
    state_id="s0", teacher="b", error_code="rate_limited", error_message="slow down"
)


def test_answers_come_back_as_they_were_in_a_fixed_order():
    table = teacher_actions_table([ANSWERED, TEXT, FAILED])
    assert teacher_actions_from_table(table) == [FAILED, TEXT, ANSWERED]


def test_a_failed_call_is_told_from_an_empty_answer():
    rows = teacher_actions_table([TEXT, FAILED]).to_pylist()
    assert [row["action_text"] for row in rows] == [None, ""]
