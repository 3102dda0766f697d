from pathlib import Path

import pytest

from replay_pipeline.ingesters import ingest
from replay_pipeline.ingesters.base import Result
from replay_pipeline.ingesters.labels import error_kind, judge_result, shortened, target_of
from tests.replay_pipeline.ingesters.logs import Log, tool_use

REJECTION = (
    "The user doesn't want to proceed with this tool use. The tool use was rejected (eg. if it "
    "was a file edit, the new_string was NOT written to the file). "
)
SUBAGENT_REJECTION = (
    "Permission for this tool use was denied. The tool use was rejected (eg. if it was a file "
    "edit, the new_string was NOT written to the file). "
)


def rows(log: Log, tmp_path: Path) -> list[dict]:
    return ingest(log.write(tmp_path), redact=False).states.to_pylist()


@pytest.mark.parametrize(
    ("text", "outcome", "kind"),
    [
        ("Exit code 1\nboom", "tool_error", "exit_code"),
        ("<tool_use_error>File does not exist.</tool_use_error>", "tool_error", "not_found"),
        (
            "ENOENT: no such file or directory, posix_spawn '/opt/agent/bin/search'",
            "tool_error",
            "not_started",
        ),
        ("EACCES: permission denied, spawn rg", "tool_error", "not_started"),
        ("Exit code 2\ngrep: tide.go: No such file or directory", "tool_error", "exit_code"),
        ("EISDIR: illegal operation on a directory, read", "tool_error", "is_directory"),
        (
            "<tool_use_error>File has not been read yet. Read it first.</tool_use_error>",
            "tool_error",
            "not_read_yet",
        ),
        ("String to replace not found in file.\nString: x", "tool_error", "string_not_found"),
        ("Found 3 matches of the string to replace, but", "tool_error", "multiple_matches"),
        ("No changes to make: old_string and new_string", "tool_error", "no_change"),
        ("File has been modified since read, either by", "tool_error", "modified_since_read"),
        ("File content (26001 tokens) exceeds maximum allowed", "tool_error", "too_large"),
        ("InputValidationError: Grep failed due to", "tool_error", "invalid_input"),
        ("Error: No such tool available: Foo", "tool_error", "no_such_tool"),
        ("Command timed out after 2m 0.0s", "tool_error", "timeout"),
        ("EACCES: permission denied, open '/etc/x'", "tool_error", "permission"),
        ("Request failed with status code 404", "tool_error", "network"),
        ("MCP error -32602: bad", "tool_error", "mcp_error"),
        ("Something odd", "tool_error", "other"),
        ("Exit code: 1\nFAIL", "tool_error", "exit_code"),
        ("Chunk ID: 1a\nProcess exited with code 2\nOutput:\n", "tool_error", "exit_code"),
        ("TimeoutError: locator.click: Timeout 5000ms exceeded", "tool_error", "timeout"),
        ("No task found with ID: b1", "tool_error", "not_found"),
        ("File access denied: /etc/shadow", "tool_error", "permission"),
        ("Sibling tool call errored", "cancelled_sibling", None),
        ("Permission for this tool use was denied. The", "denied_by_policy", None),
        ("Claude requested permissions, but you haven't granted it yet.", "denied_by_policy", None),
        ("PreToolUse:Bash hook error: [check.sh]: no", "hook_blocked", None),
        (REJECTION + "STOP what you are doing", "user_rejected", None),
        (SUBAGENT_REJECTION + "The user said:\nput it in a file", "user_rejected", None),
        (SUBAGENT_REJECTION + "Try a different approach.", "denied_by_policy", None),
        ("The agent proposed a plan that was rejected by the user. It", "user_rejected", None),
        ("[Request interrupted by user for tool use]", "interrupted", None),
    ],
)
def test_an_error_text_is_told_apart(text: str, outcome: str, kind: str | None):
    assert judge_result(Result(text, is_error=True)) == (outcome, kind)


def test_a_hook_named_in_failing_test_output_is_an_exit_code():
    text = "Exit code 1\n--- FAIL: TestHook: hook returned 2"
    assert judge_result(Result(text, is_error=True)) == ("tool_error", "exit_code")


def test_recorded_denials_win_over_words():
    assert judge_result(Result("x", True, "user-rejected"))[0] == "user_rejected"
    assert judge_result(Result("x", True, "automode-blocked"))[0] == "denied_by_policy"


def test_feedback_with_a_rejection_is_the_hint(tmp_path: Path):
    log = Log()
    log.user("go")
    log.calls("m1", "t1", "Edit", file_path="a")
    text = REJECTION + "To tell you how to proceed, the user said:\nuse the helper instead"
    log.answers("t1", text, is_error=True)
    log.calls("m2", "t2", "Edit", file_path="a")
    log.answers("t2", REJECTION, is_error=True, toolDenialKind="user-rejected", userFeedback="no!")
    first, second = rows(log, tmp_path)
    assert (first["outcome"], first["hint"]) == ("user_rejected", "use the helper instead")
    assert (second["outcome"], second["hint"]) == ("user_rejected", "no!")


def test_what_the_user_types_after_a_bare_rejection_is_the_hint(tmp_path: Path):
    log = Log()
    log.user("go")
    log.calls("m1", "t1", "Bash", command="rm -r x")
    log.answers("t1", REJECTION + "STOP", is_error=True)
    log.user([{"type": "text", "text": "[Request interrupted by user for tool use]"}])
    log.user("only delete the cache")
    log.says("m2", "ok")
    first, _ = rows(log, tmp_path)
    assert (first["outcome"], first["hint"]) == ("user_rejected", "only delete the cache")


def test_the_worst_of_parallel_calls_decides(tmp_path: Path):
    log = Log()
    log.user("go")
    log.says("m1", tool_use("t1"), tool_use("t2", "Bash"), tool_use("t3"))
    log.answers("t1", "fine")
    log.answers("t2", "Exit code 2\nno", is_error=True)
    (state,) = rows(log, tmp_path)
    assert (state["outcome"], state["error_kind"]) == ("tool_error", "exit_code")
    assert state["hint"] == "Exit code 2\nno"


@pytest.mark.parametrize(
    ("words", "answer", "outcome"),
    [
        ("[Request interrupted by user]", "ok", "ok"),
        ("[Request interrupted by user for tool use]", "ok", "interrupted"),
        ("[Request interrupted by user]", None, "interrupted"),
    ],
)
def test_calls_that_all_succeeded_are_not_what_a_user_interrupted(
    words: str, answer: str | None, outcome: str, tmp_path: Path
):
    log = Log()
    log.user("go")
    log.calls("m1", "t1", "Read", file_path="a")
    if answer is not None:
        log.answers("t1", answer)
    log.user([{"type": "text", "text": words}])
    result = ingest(log.write(tmp_path))
    assert result.states["outcome"].to_pylist() == [outcome]


def test_an_interrupt_names_its_message(tmp_path: Path):
    log = Log()
    log.user("go")
    log.says("m1", "long story")
    log.user("[Request interrupted by user]", interruptedMessageId="m1")
    (state,) = rows(log, tmp_path)
    assert state["outcome"] == "interrupted"


def test_a_failed_call_is_recovered_by_the_next_that_works_on_the_same_target(tmp_path: Path):
    log = Log()
    log.user("go")
    log.calls("m1", "t1", "Edit", file_path="a.py", old_string="x")
    log.answers("t1", "String to replace not found in file.", is_error=True)
    log.calls("m2", "t2", "Edit", file_path="b.py", old_string="y")
    log.answers("t2")
    log.calls("m3", "t3", "Edit", file_path="a.py", old_string="z")
    log.answers("t3")
    found = rows(log, tmp_path)
    assert found[0]["recovered_by"] == found[2]["state_id"]
    assert found[1]["recovered_by"] is None


def test_nothing_recovers_across_a_compaction_or_on_another_branch(tmp_path: Path):
    log = Log()
    ask = log.user("go")
    log.calls("m1", "t1", "Bash", command="make test")
    log.answers("t1", "Exit code 1", is_error=True)
    log.user("other way", parent=ask)
    log.calls("m3", "t3", "Bash", command="make test")
    log.answers("t3")
    log.row("system", subtype="compact_boundary", parent=None)
    log.user("Summary", isCompactSummary=True)
    log.calls("m4", "t4", "Bash", command="make test")
    log.answers("t4")
    assert [r["recovered_by"] for r in rows(log, tmp_path)] == [None, None, None]


@pytest.mark.parametrize(
    ("arguments", "target"),
    [
        ('{"file_path": "a.py", "limit": 3}', "a.py"),
        ('{"command": "cd x && CI=1 go test ./... -run X"}', "go test"),
        ('{"command": "ls -la"}', "ls"),
        ('{"command": ["bash", "-lc", "x"]}', "bash"),
        ('{"pattern": "TODO"}', "TODO"),
        ("[1]", ""),
        ("not json", ""),
    ],
)
def test_target_of_a_call(arguments: str, target: str):
    assert target_of(arguments) == target


def test_a_long_hint_keeps_head_and_tail():
    text = shortened("a" * 5000 + "b" * 5000)
    assert len(text) <= 4_000
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert error_kind("") == "other"


@pytest.mark.parametrize(
    "text",
    [
        "Exit code 1: what does it mean?",
        "Error: unknown flag: --all",
        "<retrieval_status>timeout</retrieval_status>\n<status>running</status>",
        "The user rejected the last draft, says the log",
        "12: permission denied is handled here",
    ],
)
def test_a_result_that_the_log_does_not_call_an_error_is_none(text: str):
    assert judge_result(Result(text)) == ("ok", None)
