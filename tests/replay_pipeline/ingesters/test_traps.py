"""One test per way in which a session log misleads its readers."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from replay_pipeline.errors import IngestError, SchemaError
from replay_pipeline.ingesters import (
    ClaudeCodeIngester,
    IngestResult,
    Traces,
    corpus,
    ingest,
    open_traces,
    write_traces,
)
from replay_pipeline.ingesters.log_rows import state_ids_for
from tests.replay_pipeline.ingesters.logs import Log, shape, states_of, tool_use


@pytest.fixture
def states(tmp_path: Path):
    """Trace states of one log, by message id."""

    def read(log: Log, name: str | None = None) -> dict[str, Any]:
        result = ingest(log.write(tmp_path, name), redact=False)
        return by_message(result, log)

    return read


def by_message(result: IngestResult, *logs: Log) -> dict[str, Any]:
    names = {name.decode() for log in logs for name in re.findall(rb'"id": "(m[^"]*)"', log.bytes)}
    ids = dict(zip(state_ids_for(list(names)), names, strict=True))
    return {ids.get(s["state_id"], s["state_id"]): s for s in states_of(result)}


def test_02_usage_is_counted_once_per_message(tmp_path: Path):
    log = Log()
    log.user("go")
    log.says("m1", "a", message={"usage": {"input_tokens": 100, "output_tokens": 1}})
    log.says("m1", "b", message={"usage": {"input_tokens": 100, "output_tokens": 9}})
    usage = ingest(log.write(tmp_path)).report.usage
    assert (usage["input_tokens"], usage["output_tokens"]) == (100, 9)


def test_04_parallel_calls_make_no_fork(states):
    log = Log()
    log.user("go")
    first = log.calls("m1", "t1")
    second = log.calls("m1", "t2")
    log.answers("t1", "one", parent=first)
    log.answers("t2", "two", parent=second)
    log.says("m2", "done")
    found = states(log)
    assert shape(found["m2"]["messages"]) == ["> go", "(t1+t2)", "t1=one", "t2=two"]
    assert not found["m2"]["alternatives"]
    assert found["m1"]["outcome"] == "ok"


def test_05_results_off_the_chain_of_parents_are_kept_in_the_order_in_which_they_came(states):
    log = Log()
    log.user("go")
    first = log.calls("m1", "t1")
    second = log.calls("m1", "t2")
    log.answers("t2", "two", parent=second)
    log.answers("t1", "one", parent=first)
    log.says("m2", "done", parent=second)
    assert shape(states(log)["m2"]["messages"]) == ["> go", "(t1+t2)", "t2=two", "t1=one"]


@pytest.mark.parametrize("anchor", ["sum", "boundary", "unknown"])
@pytest.mark.parametrize("named", ["anchor", "tail"])
@pytest.mark.parametrize("form", ["preservedSegment", "preservedMessages"])
def test_07_messages_that_a_compaction_kept_follow_the_summary(
    states, form: str, named: str, anchor: str
):
    log = Log()
    log.user("go")
    log.does("m1", result="big")
    head = log.user("next")
    middle = log.calls("m2", "t2")
    tail = log.answers("t2", "kept")
    kept = {"headUuid": head, "anchorUuid": anchor, "tailUuid": tail}
    if form == "preservedMessages":
        kept = {"anchorUuid": anchor, "uuids": [head, middle, tail]}
    log.row(
        "system",
        subtype="compact_boundary",
        uuid="boundary",
        parent=None,
        logicalParentUuid=tail,
        compactMetadata={"trigger": "auto", form: kept},
    )
    log.user("Summary.", uuid="sum", isCompactSummary=True)
    log.says("m3", "on", parent="sum" if named == "anchor" else tail)
    found = states(log)
    assert shape(found["m3"]["messages"]) == ["> Summary.\n\nnext", "(t2)", "t2=kept"]
    assert len(found) == 3


def test_08_the_hidden_part_of_the_prompt_is_fitted_per_segment(tmp_path: Path):
    log = Log()
    log.user("x" * 4000)
    for i in range(4):
        log.says(f"m{i}", "y" * 400, tokens=31_000 + 110 * i)
        log.user("z")
    log.row("system", subtype="compact_boundary", parent=None)
    log.user("Summary.", isCompactSummary=True)
    for i in range(4, 8):
        log.says(f"m{i}", "y" * 400, tokens=52_000 + 110 * (i - 4))
        log.user("z")
    fidelity = ingest(log.write(tmp_path)).states["fidelity"].to_pylist()
    assert all(abs(f - 1) < 0.02 for f in fidelity), fidelity


def test_09_a_microcompaction_clears_old_results_for_later_steps_only(states):
    log = Log()
    log.user("go")
    log.does("m1", result="long")
    log.does("m2", result="short")
    log.row(
        "system",
        subtype="microcompact_boundary",
        microcompactMetadata={"trigger": "auto", "compactedToolIds": ["t-m1"]},
    )
    log.says("m3", "done")
    found = states(log)
    assert shape(found["m2"]["messages"])[2] == "t-m1=long"
    assert shape(found["m3"]["messages"])[2:] == [
        "t-m1=[Old tool result content cleared]",
        "(t-m2)",
        "t-m2=short",
    ]


def test_10_a_parent_that_was_never_written_does_not_lose_the_history(states):
    log = Log()
    log.user("go")
    log.does("m1")
    log.says("m2", "done", parent="never-written")
    assert shape(states(log)["m2"]["messages"]) == ["> go", "(t-m1)", "t-m1=ok"]


def test_10_a_parent_that_is_written_later_is_waited_for(states):
    log = Log()
    log.user("go", uuid="first")
    log.user("more", uuid="late", parent="first")
    log.says("m1", "done", parent="late")
    log.lines[1], log.lines[2] = log.lines[2], log.lines[1]
    assert shape(states(log)["m1"]["messages"]) == ["> go\n\nmore"]


def test_10_glued_lines_give_both_rows(tmp_path: Path):
    log = Log()
    log.user("go")
    log.does("m1")
    log.says("m2", "done")
    log.lines[1] = log.lines[1].rstrip(b"\n")
    report = ingest(log.write(tmp_path)).report
    assert (report.rows, report.rows_used, report.n_states) == (4, 4, 2)
    assert report.notes == {"glued_line": 1}


def test_10_byte_order_mark_nuls_and_blank_lines_are_no_harm_and_counted(tmp_path: Path):
    log = Log()
    log.raw(b"\xef\xbb\xbf")
    log.user("go")
    log.raw(b"\x00\x00\x00\n\r\n\n")
    log.says("m1", "done")
    log.lines[-1] = b"\x00\x00" + log.lines[-1]
    report = ingest(log.write(tmp_path)).report
    assert (report.rows, report.rows_used, report.skipped) == (3, 2, {"null_bytes": 1})


def test_12_a_resumed_copy_adds_only_what_is_new(tmp_path: Path):
    log = Log("one")
    log.user("go")
    log.does("m1")
    copy = Log("two")
    copy.lines = [line.replace(b'"one"', b'"two"') for line in log.lines]
    copy.last = log.last
    copy.says("m2", "new")
    result = ingest([log.write(tmp_path), copy.write(tmp_path)])
    assert (result.report.n_states, result.report.n_duplicate_states) == (2, 1)
    assert shape(by_message(result, copy)["m2"]["messages"]) == ["> go", "(t-m1)", "t-m1=ok"]


def test_12_a_snapshot_of_a_session_counts_once(tmp_path: Path):
    log = Log()
    log.user("go")
    log.does("m1")
    log.write(tmp_path, "checkpoint-1/full.jsonl")
    log.says("m2", "done")
    log.write(tmp_path, "checkpoint-2/full.jsonl")
    result = ingest(tmp_path)
    assert result.report.n_states == 2
    assert result.sessions.num_rows == 1


def test_12_rows_copied_inside_a_file_count_once(tmp_path: Path):
    log = Log()
    log.user("go")
    log.does("m1")
    for line in list(log.lines):
        log.raw(line)
    report = ingest(log.write(tmp_path)).report
    assert (report.n_states, report.skipped) == (1, {"duplicate_row": 3})


def subagent_rows(log: Log) -> None:
    """What a subagent did, as progress rows of its parent."""
    inner = [
        {"type": "user", "message": {"content": "Find it."}},
        {
            "type": "assistant",
            "message": {
                "id": "ms1",
                "model": "claude-haiku-4-5",
                "content": [tool_use("ts1", "Grep", pattern="x")],
                "usage": {"input_tokens": 40, "output_tokens": 2},
            },
        },
        {
            "type": "user",
            "message": {
                "content": [{"type": "tool_result", "tool_use_id": "ts1", "content": "a.py"}]
            },
        },
        {"type": "assistant", "message": {"id": "ms2", "content": [{"type": "text", "text": "a"}]}},
    ]
    for i, message in enumerate(inner):
        data = {"type": "agent_progress", "agentId": "a1", "message": message | {"uuid": f"p{i}"}}
        log.row("progress", data=data, parentToolUseID="t1")


def test_13_subagents_in_progress_rows_are_sessions_of_their_own(tmp_path: Path):
    log = Log()
    log.user("go")
    log.calls("m1", "t1", "Task", prompt="Find it.")
    subagent_rows(log)
    log.answers("t1", "It is a.py")
    log.says("m2", "done")
    result = ingest(log.write(tmp_path))
    found = by_message(result, log)
    assert shape(found["ms2"]["messages"]) == ["> Find it.", "(ts1)", "ts1=a.py"]
    assert shape(found["m2"]["messages"]) == ["> go", "(t1)", "t1=It is a.py"]
    assert result.sessions["agent_id"].to_pylist() == [None, "a1"]
    assert result.sessions["parent_session_id"].to_pylist() == [None, "session-1"]


def test_13_a_subagent_in_both_places_counts_once(tmp_path: Path):
    log = Log()
    log.user("go")
    log.calls("m1", "t1", "Task", prompt="Find it.")
    subagent_rows(log)
    log.answers("t1", "It is a.py")
    agent = Log(agentId="a1", isSidechain=True)
    agent.user("Find it.")
    agent.says("ms1", tool_use("ts1", "Grep", pattern="x"))
    agent.answers("ts1", "a.py")
    agent.says("ms2", "a")
    log.write(tmp_path)
    agent.write(tmp_path, "session-1/subagents/agent-a1.jsonl")
    result = ingest(tmp_path)
    assert (result.report.n_states, result.report.n_duplicate_states) == (3, 2)
    assert sorted(result.sessions["session_id"].to_pylist()) == ["session-1", "session-1.agent-a1"]


def test_13_old_sidechains_in_the_same_file_are_apart(tmp_path: Path):
    log = Log()
    log.user("go")
    main = log.calls("m1", "t1", "Task", prompt="Find it.")
    log.user("Find it.", parent=None, isSidechain=True, uuid="side-root")
    log.says("ms1", "found", isSidechain=True)
    log.answers("t1", "found", parent=main)
    log.says("m2", "done")
    result = ingest(log.write(tmp_path))
    found = by_message(result, log)
    assert shape(found["ms1"]["messages"]) == ["> Find it."]
    assert shape(found["m2"]["messages"]) == ["> go", "(t1)", "t1=found"]
    assert result.sessions["session_id"].to_pylist() == ["session-1", "session-1.agent-side-roo"]


def test_13_agents_that_repeat_the_main_session_are_left_out(tmp_path: Path):
    log = Log()
    log.user("go")
    log.says("m1", "done")
    log.write(tmp_path)
    for name in ("acompact-1", "aprompt_suggestion-2", "aside_question-3"):
        copy = Log()
        copy.user("go")
        copy.says(f"m-{name}", "other")
        copy.write(tmp_path, f"session-1/subagents/agent-{name}.jsonl")
    report = ingest(tmp_path).report
    assert (report.n_states, report.skipped) == (1, {"housekeeping_agent": 6})


def test_14_thinking_is_kept_apart_and_never_required(tmp_path: Path):
    log = Log()
    log.user("go")
    log.says("m1", {"type": "thinking", "thinking": "", "signature": "s" * 50}, "a")
    log.says("m2", {"type": "thinking", "thinking": "hm", "signature": "s" * 50}, "b")
    log.says("m3", {"type": "redacted_thinking", "data": "zz"}, "c")
    result = ingest(log.write(tmp_path))
    assert result.turns["thinking"].to_pylist() == [None, None, "hm", None]
    assert "sss" not in json.dumps(result.turns.to_pylist(), default=str)
    assert shape(by_message(result, log)["m3"]["messages"]) == ["> go", "a", "b"]


def test_16_synthetic_messages_are_no_actions(tmp_path: Path):
    log = Log()
    log.user("go")
    log.says("m1", "API Error", isApiErrorMessage=True)
    log.says("m2", "No response requested.", message={"model": "<synthetic>"})
    log.row("system", subtype="api_error")
    log.user("and now?")
    log.says("m3", "done")
    result = ingest(log.write(tmp_path))
    assert result.report.skipped == {"synthetic": 1}
    found = by_message(result, log)
    assert list(found) == ["m3"]
    # What the client says in the model's place as a session is taken up again is sent like the rest.
    assert shape(found["m3"]["messages"]) == ["> go", "No response requested.", "> and now?"]


def test_17_retracted_messages_are_no_history(states):
    log = Log()
    log.user("go")
    bad = log.says("m1", "I refuse", message={"model": "model-a"})
    log.row("system", subtype="model_refusal_fallback", retractedMessageUuids=[bad])
    log.says("m2", "I do it", message={"model": "model-b"})
    found = states(log)
    assert found["m1"]["outcome"] == "retracted"
    assert shape(found["m2"]["messages"]) == ["> go"]
    assert found["m2"]["student_model"] == "model-b"


def test_18_a_queued_message_beside_the_loop_is_seen_by_the_next_step(states):
    log = Log()
    log.user("go")
    log.calls("m1", "t1")
    result = log.answers("t1")
    log.user("and hurry", parent=result)
    log.says("m2", "on it", parent=result)
    found = states(log)
    assert shape(found["m2"]["messages"]) == ["> go", "(t1)", "t1=ok", "> and hurry"]
    assert found["m1"]["outcome"] == "ok"


def test_18_a_message_queued_after_a_step_had_begun_is_seen_by_the_one_after(states):
    log = Log()
    log.user("go")
    log.calls("m1", "t1")
    result = log.answers("t1")
    log.calls("m2", "t2")
    log.user("and hurry", parent=result)
    log.answers("t2", parent="session-1-u4")
    log.says("m3", "done")
    assert shape(states(log)["m3"]["messages"]) == [
        "> go",
        "(t1)",
        "t1=ok",
        "(t2)",
        "t2=ok",
        "> and hurry",
    ]


def test_18_a_queued_command_attachment_is_a_user_message(states):
    log = Log()
    log.user("go")
    log.does("m1")
    log.row("attachment", attachment={"type": "queued_command", "prompt": "and hurry"})
    log.row("queue-operation", uuid=None, operation="dequeue")
    log.says("m2", "done")
    assert shape(states(log)["m2"]["messages"])[-1] == "> and hurry"


def operation(log: Log, name: str, **fields: Any) -> None:
    log.row("queue-operation", uuid=None, operation=name, **fields)


@pytest.mark.parametrize("text", ["rather on main", "<task-notification>\n<task-id>b1</task-id>"])
@pytest.mark.parametrize("is_late", [False, True])
def test_18_what_was_taken_from_the_queue_is_seen_by_the_next_step(
    states, is_late: bool, text: str
):
    log = Log()
    log.user("go")
    log.calls("m1", "t1")
    operation(log, "enqueue", content=text)
    if is_late:
        log.answers("t1")
    operation(log, "remove")
    if not is_late:
        log.answers("t1")
    log.says("m2", "on it")
    log.user("more")
    log.says("m3", "done")
    found = states(log)
    assert shape(found["m1"]["messages"]) == ["> go"]
    assert shape(found["m2"]["messages"]) == ["> go", "(t1)", "t1=ok", f"> {text}"]
    assert f"> {text}" in shape(found["m3"]["messages"])


def test_18_what_was_taken_back_or_has_a_row_of_its_own_is_not_said_twice(states, tmp_path: Path):
    log = Log()
    log.user("go")
    log.calls("m1", "t1")
    operation(log, "enqueue", content="taken back")
    operation(log, "popAll", content="taken back")
    operation(log, "enqueue", content="a row of its own")
    operation(log, "dequeue")
    operation(log, "enqueue", content="after an interruption")
    operation(log, "enqueue", content="/exit")
    operation(log, "enqueue", content="an attachment")
    log.answers("t1")
    log.user("after an interruption")
    operation(log, "remove")
    operation(log, "remove")
    log.row("attachment", attachment={"type": "queued_command", "prompt": "an attachment"})
    log.says("m2", "done")
    operation(log, "enqueue", content="never shown")
    operation(log, "remove")
    texts = [text for text in shape(states(log)["m2"]["messages"]) if text.startswith("> ")]
    assert texts == ["> go", "> after an interruption", "> an attachment"] or texts == [
        "> go", "> after an interruption\n\nan attachment"
    ]  # fmt: skip
    report = ingest(log.write(tmp_path)).report
    assert report.rows == report.rows_used + sum(report.skipped.values())


def test_18_what_the_queue_held_for_the_client_was_not_said_and_what_was_typed_is_not_lost(states):
    """As 2.1.49 logs it: notes of tasks that begin are removed at the end of a turn."""
    log = Log()
    note, told = '{"task_id":"b1","task_type":"local_bash"}', "<task-notification>\nb1"
    log.user("go")
    log.calls("m1", "t1", "Bash", command="sleep 9", run_in_background=True)
    operation(log, "enqueue", content=note)
    log.answers("t1")
    log.calls("m2", "t2", "Bash", command="sleep 1")
    operation(log, "enqueue", content=told)
    operation(log, "enqueue", content="rather on main")
    log.answers("t2")
    operation(log, "remove")
    log.says("m3", "on main")
    operation(log, "enqueue", content="and push")
    operation(log, "remove")
    operation(log, "dequeue")
    log.user("and push")
    log.says("m4", "pushed")
    operation(log, "dequeue")
    log.user(told)
    log.says("m5", "done")
    found = states(log)
    assert shape(found["m3"]["messages"])[-1] == "> rather on main"
    assert shape(found["m4"]["messages"])[-2:] == ["on main", "> and push"]
    assert shape(found["m5"]["messages"])[-2:] == ["pushed", f"> {told}"]
    assert note not in str(found["m5"]["messages"])


def test_18_bodies_of_skills_that_were_loaded_side_by_side_are_all_seen(states):
    log = Log()
    log.user("go")
    calls = [log.calls("m1", f"t{n}", "Skill", skill=f"s{n}") for n in range(3)]
    for number, call in enumerate(calls):
        result = log.answers(f"t{number}", f"Launching skill: s{number}", parent=call)
        last = log.user([{"type": "text", "text": f"Body {number}"}], parent=result, isMeta=True)
    log.says("m2", "done", parent=last)
    assert "> Body 0\n\nBody 1\n\nBody 2" in shape(states(log)["m2"]["messages"])


def test_18_what_hooks_say_between_skills_that_are_loaded_side_by_side_is_seen(states):
    log = Log()
    log.user("go")
    calls = [log.calls("m1", f"t{n}", "Skill", skill=f"s{n}") for n in range(2)]
    for number, call in enumerate(calls):
        log.answers(f"t{number}", parent=call)
        hook = {"type": "hook_additional_context", "hookName": "H", "content": f"hook {number}"}
        log.row("attachment", attachment=hook)
        last = log.user([{"type": "text", "text": f"Body {number}"}], isMeta=True)
    log.says("m2", "done", parent=last)
    (said,) = shape(states(log)["m2"]["messages"])[4:]
    places = [said.index(words) for words in ("hook 0", "Body 0", "hook 1", "Body 1")]
    assert places == sorted(places)


def test_19_a_local_command_at_a_dead_end_is_no_rewind(states):
    log = Log()
    log.user("go")
    last = log.says("m1", "done")
    log.user("<command-name>/exit</command-name>", parent=last)
    log.user("<local-command-stdout>Bye!</local-command-stdout>")
    log.user("again", parent=last)
    log.says("m2", "done again")
    found = states(log)
    assert shape(found["m2"]["messages"]) == ["> go", "done", "> again"]
    assert {s["outcome"] for s in found.values()} == {"final_text"}


def test_19_a_rewind_gives_natural_alternatives(states):
    log = Log()
    ask = log.user("go")
    log.does("m1", "Bash", command="rm -r build")
    log.says("m3", tool_use("t3", "Read", file_path="a"), parent=ask)
    log.answers("t3")
    log.says("m4", "done")
    found = states(log)
    assert found["m1"]["outcome"] == "rewound"
    assert found["m3"]["outcome"] == "ok"
    assert shape(found["m1"]["alternatives"]) == ["(t3)"]
    assert shape(found["m3"]["alternatives"]) == ["(t-m1)"]
    assert shape(found["m4"]["messages"]) == ["> go", "(t3)", "t3=ok"]


def test_19_a_prompt_that_was_sent_again_is_the_same_prefix(states):
    log = Log()
    log.user("hello")
    first = log.says("m0", "hi")
    log.user("go", parent=first)
    log.says("m1", "left")
    log.user("go", parent=first)
    log.says("m2", "kept")
    found = states(log)
    assert (found["m1"]["outcome"], found["m2"]["outcome"]) == ("rewound", "final_text")
    assert shape(found["m2"]["alternatives"]) == ["left"]


def test_20_meta_rows_are_seen_by_the_model_and_transcript_rows_are_not(states):
    log = Log()
    log.user("go")
    log.calls("m1", "t1", "Skill", skill="pdf")
    log.answers("t1", "Launching skill")
    log.user([{"type": "text", "text": "Base directory: /skills/pdf"}], isMeta=True)
    log.user("only on the screen", isVisibleInTranscriptOnly=True)
    log.says("m2", "done")
    assert shape(states(log)["m2"]["messages"])[-1] == "> Base directory: /skills/pdf"


def test_22_the_file_decides_the_order_and_not_the_clock(states):
    log = Log()
    log.user("go", timestamp="2026-03-01T12:00:00.000Z")
    log.does("m1")
    log.says("m2", "done", timestamp="2020-01-01T00:00:00.000Z")
    log.user("bad clock", timestamp="yesterday")
    log.says("m3", "bye", timestamp=None)
    found = states(log)
    assert list(found) == ["m1", "m2", "m3"]
    assert shape(found["m3"]["messages"])[-1] == "> bad clock"


def test_23_a_call_cancelled_for_its_sibling_is_neutral(states):
    log = Log()
    log.user("go")
    log.calls("m1", "t1", "Bash", command="make")
    log.calls("m1", "t2", "Bash", command="ls")
    log.answers("t1", "Exit code 2\nno rule", is_error=True)
    text = "<tool_use_error>Sibling tool call errored</tool_use_error>"
    log.answers("t2", text, is_error=True)
    log.calls("m2", "t3", "Bash", command="ls")
    log.answers("t3", text, is_error=True)
    found = states(log)
    assert (found["m1"]["outcome"], found["m1"]["error_kind"]) == ("tool_error", "exit_code")
    assert (found["m2"]["outcome"], found["m2"]["error_kind"]) == ("cancelled_sibling", None)


def test_24_garbage_calls_stay_as_they_are_and_teach_no_tool(tmp_path: Path):
    log = Log()
    log.user("go")
    name = 'Task" >\n<parameter name="description'
    log.says("m1", {"type": "tool_use", "id": "t1", "name": name, "input": "not an object"})
    log.answers("t1", "No such tool", is_error=True)
    log.says("m2", {"type": "tool_use", "id": "t2", "name": "Read", "input": [1]})
    log.answers("t2", "InputValidationError: Read failed", is_error=True)
    result = ingest(log.write(tmp_path))
    found = by_message(result, log)
    assert found["m1"]["student_action"]["tool_calls"][0]["function"]["name"] == name
    assert found["m2"]["student_action"]["tool_calls"][0]["function"]["arguments"] == "[1]"
    assert result.tools.num_rows == 0


def test_25_lone_surrogates_and_bytes_that_are_no_text_are_replaced(tmp_path: Path):
    log = Log()
    log.user("go")
    log.does("m1", result="\ud83d cut emoji")
    log.says("m2", tool_use("t2", "Bash", command="echo \udcff"))
    log.answers("t2", "PLACE")
    log.lines[-1] = log.lines[-1].replace(b"PLACE", b"\xff\xfe latin")
    log.says("m3", "done")
    result = ingest(log.write(tmp_path))
    found = by_message(result, log)
    texts = shape(found["m3"]["messages"])
    assert texts[2] == "t-m1=\ufffd cut emoji"
    assert texts[-1].endswith("latin")
    json.dumps(found["m3"]).encode()
    assert result.report.rows == result.report.rows_used == 6


@pytest.mark.slow
def test_25_a_line_of_64_megabytes_is_survived(tmp_path: Path):
    log = Log()
    log.user("go")
    log.does("m1", result="x" * 64_000_000)
    log.says("m2", "done")
    result = ingest(log.write(tmp_path), redact=False)
    assert result.report.n_states == 2
    assert len(result.turns["messages_json"][1].as_py()) > 64_000_000


def test_26_several_session_ids_in_one_file(tmp_path: Path):
    log = Log("real")
    log.common["sessionId"] = "older"
    log.user("go")
    log.common["sessionId"] = "real"
    log.says("m1", "done")
    result = ingest(log.write(tmp_path))
    assert result.sessions["session_id"].to_pylist() == ["real"]
    assert ingest(log.write(tmp_path, "full.jsonl")).sessions["session_id"].to_pylist() == ["older"]


def test_a_decision_with_nothing_before_it_is_left_out_and_counted(tmp_path: Path):
    log = Log()
    log.says("m1", "whence?", parent=None)
    log.user("go")
    log.says("m2", "done")
    report = ingest(log.write(tmp_path)).report
    assert (report.n_states, report.answers["without_prompt"]) == (1, 1)


def test_images_and_unknown_blocks_are_named(states):
    log = Log()
    image = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
    log.user([{"type": "text", "text": "see"}, image])
    log.calls("m1", "t1")
    log.answers("t1", [{"type": "text", "text": "a"}, image])
    log.says("m2", {"type": "hologram", "x": 1}, "done")
    found = states(log)
    assert shape(found["m2"]["messages"]) == ["> see\n\n[image]", "(t1)", "t1=a\n[image]"]
    assert found["m2"]["student_action"]["content"] == "done"


def test_fields_of_a_wrong_type_cost_only_themselves(tmp_path: Path):
    log = Log()
    log.user("go", isMeta="yes", version=2, thinkingMetadata=[])
    log.says("m1", "done", message={"usage": {"input_tokens": "many"}, "stop_reason": 7})
    result = ingest(log.write(tmp_path))
    found = by_message(result, log)
    assert shape(found["m1"]["messages"]) == ["> go"]
    assert found["m1"]["student_action"]["content"] == "done"
    assert result.report.notes == {"mistyped_field": 2}


@pytest.mark.parametrize("is_redacted", [False, True])
@pytest.mark.parametrize("depth", [985, 100_000])
@pytest.mark.parametrize("place", ["sidecar", "call", "result", "attachment"])
def test_what_is_nested_deeply_costs_at_most_its_row(tmp_path: Path, place, depth, is_redacted):
    at = {place: "DEEP"}
    log = Log()
    log.user("go")
    log.calls("m1", "t1", x=at.get("call"))
    log.answers("t1", at.get("result", "ok"), toolUseResult=at.get("sidecar"))
    log.row("attachment", attachment={"type": "file", "content": at.get("attachment", "text")})
    log.says("m2", "done")
    log.lines = [line.replace(b'"DEEP"', b"[" * depth + b"]" * depth) for line in log.lines]
    result = ingest(log.write(tmp_path), redact=is_redacted)
    report = result.report
    assert report.rows == report.rows_used + sum(report.skipped.values()) == 5
    assert by_message(result, log)["m2"]["student_action"]["content"] == "done"


def test_content_of_any_type_is_shown_as_text(states):
    log = Log()
    log.user("go")
    for i, content in enumerate([{"a": [1, "b"]}, ["c", {"text": 5, "type": "text"}, 7], None]):
        log.calls(f"m{i}", f"t{i}")
        log.answers(f"t{i}", content)
    log.says("m9", "done")
    shown = shape(states(log)["m9"]["messages"])[2::2]
    assert shown == ['t0={"a":[1,"b"]}', "t1=c\n[text]\n[unknown]", "t2="]


def test_the_action_is_never_in_its_own_prefix(tmp_path: Path):
    log = Log()
    log.user("go")
    for i in range(5):
        log.does(f"m{i}", file_path=f"only-{i}")
    for state in ClaudeCodeIngester(redact=False).ingest(log.write(tmp_path)):
        (call,) = state["student_action"]["tool_calls"]
        assert call["function"]["arguments"] not in json.dumps(state["messages"])
        assert call["id"] not in json.dumps(state["messages"])


def test_one_broken_file_among_many_is_counted_and_not_fatal(tmp_path: Path):
    log = Log()
    log.user("go")
    log.says("m1", "done")
    log.write(tmp_path)
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "zeros.jsonl").write_bytes(bytes(5000))
    (tmp_path / "binary.jsonl").write_bytes(b"\x89PNG\r\n\x1a\n" * 50)
    report = ingest(tmp_path).report
    assert report.n_states == 1
    assert sum(report.skipped_files.values()) == 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "none.jsonl", "no such file or folder"),
        (lambda folder: folder, "no session files"),
        (lambda folder: _written(folder, b"{}\n"), "not a session"),
        (lambda folder: _written(folder, b""), "not a session"),
    ],
)
def test_a_path_that_gives_nothing_is_one_clear_line(tmp_path: Path, make: Any, words: str):
    with pytest.raises(IngestError, match=words) as caught:
        ClaudeCodeIngester().ingest(make(tmp_path))
    assert "\n" not in str(caught.value)


def _written(folder: Path, data: bytes) -> Path:
    path = folder / "x.jsonl"
    path.write_bytes(data)
    return path


def test_tables_come_back_as_they_were_written(tmp_path: Path):
    log = Log()
    log.user("go")
    log.does("m1")
    log.says("m2", "done")
    path = log.write(tmp_path)
    write_traces(ingest(path), tmp_path / "out")
    traces = open_traces(tmp_path / "out")
    assert list(traces.materialize()) == list(ClaudeCodeIngester().ingest(path))
    assert traces.states.height == len(traces) == 2
    last = traces.states["state_id"][1]
    assert [s["state_id"] for s in traces.materialize([last, "cc1_unknown"])] == [last]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["n_states"] == 2


def test_an_action_is_stored_once(tmp_path: Path):
    log = Log()
    log.user("go")
    log.does("m1", result="found")
    log.does("m2", result="read")
    log.says("m3", "done")
    path = log.write(tmp_path)

    def stored(result: IngestResult) -> list[list[str]]:
        return [shape(json.loads(text)) for text in result.turns["messages_json"].to_pylist()]

    first = ingest(path, redact=False)
    assert stored(first) == [["> go"], ["t-m1=found"], ["t-m2=read"], []]
    # The action of a state of another batch is part of the prefix, and of no state here.
    known = set(first.states["state_id"].to_pylist()[:1])
    second = ingest(path, redact=False, known_state_ids=known)
    assert stored(second) == [["> go"], ["(t-m1)", "t-m1=found"], ["t-m2=read"], []]
    assert by_message(second, log)["m3"] == by_message(first, log)["m3"]


def test_a_prefix_without_one_of_its_actions_is_refused(tmp_path: Path):
    log = Log()
    log.user("go")
    log.does("m1")
    log.says("m2", "done")
    result = ingest(log.write(tmp_path))
    traces = Traces(
        sessions=result.sessions,
        turns=result.turns,
        states=result.states.slice(1),
        tools=result.tools,
    )
    with pytest.raises(SchemaError, match="pass whole tables"):
        list(traces.materialize())


def test_the_project_is_a_hash_unless_opted_out(tmp_path: Path):
    log = Log()
    log.user("go")
    log.says("m1", "done")
    path = log.write(tmp_path)
    (hashed,) = ingest(path).sessions["project"].to_pylist()
    (plain,) = ingest(path, hash_project=False, redact=False).sessions["project"].to_pylist()
    (redacted,) = ingest(path, hash_project=False).sessions["project"].to_pylist()
    assert len(hashed) == 16
    assert plain == "/home/kim/shop"
    assert redacted == "/home/user/shop"


def test_redaction_reaches_every_column_and_changes_no_identity(tmp_path: Path):
    secret = "ghp_" + "a1B2c3D4e5F6" * 3
    log = Log(cwd="/home/kimlee/shop")
    log.user(f"use {secret}")
    log.says("m1", {"type": "thinking", "thinking": f"so {secret}"}, f"ok {secret}")
    log.calls("m1", "t1", "Bash", command=f"curl -H {secret}", env={secret: [secret]})
    log.answers("t1", f"Exit code 1: {secret}", is_error=True)
    log.says("m2", "done")
    path = log.write(tmp_path)
    plain, clean = ingest(path, redact=False), ingest(path)
    for table in (clean.sessions, clean.turns, clean.states, clean.tools):
        text = json.dumps(table.to_pylist(), default=str)
        assert secret not in text
        assert "kimlee" not in text
    assert clean.states["state_id"] == plain.states["state_id"]
    assert clean.report.redactions["home"] > 0
    assert secret not in json.dumps(clean.report.to_json())


def test_what_never_ends_is_left_out_and_told(tmp_path, caplog, monkeypatch):
    log = Log()
    log.user("Hi")
    log.says("m1", {"type": "text", "text": "Hello"})
    (tmp_path / "a.jsonl").write_bytes(log.write(tmp_path / "aside").read_bytes())
    (tmp_path / "aside").rename(tmp_path.with_name("aside"))
    for name in ("b.jsonl", "opencode.db"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "c.jsonl").symlink_to("/dev/zero")
    far = tmp_path / "far away"
    far.mkdir()
    (far / "d.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes())
    mounts = tmp_path.with_name("mounts")
    mounts.write_text(
        f"none {tmp_path} tmpfs rw 0 0\nhost:/x {tmp_path}/far\\040away nfs4 rw 0 0\n"
    )
    monkeypatch.setattr(corpus, "_MOUNTS", mounts)
    assert ingest(tmp_path).report.files == 1
    assert f"{far}: a network folder" in caplog.text
    assert [name for name in "abc" if f"/{name}.jsonl: a pipe" in caplog.text] == ["b", "c"]
    with pytest.raises(IngestError, match="a pipe, a socket, or a device"):
        ingest(tmp_path / "b.jsonl")
