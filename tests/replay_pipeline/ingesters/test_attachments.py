"""What the model saw beside the conversation, by type of attachment and row."""

import logging
from pathlib import Path
from typing import Any

import pytest

from replay_pipeline.ingesters import attachments, ingest
from replay_pipeline.ingesters.base import RecordedUsage, Turn
from replay_pipeline.ingesters.fidelity import (
    n_tokens_of,
    predict_context,
    shares_by_client,
)
from tests.replay_pipeline.ingesters.logs import Log, shape
from tests.replay_pipeline.ingesters.test_traps import by_message

FILE = {"type": "text", "file": {"filePath": "/p/a.py", "content": "x = 1"}}
ISSUE = {"message": "no such name", "severity": "Error", "range": {"start": {"line": 41}}}
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "async_hook_response": (
        {"response": {"systemMessage": "lint", "hookSpecificOutput": {"additionalContext": "main"}}},
        "lint\n\nmain",
    ),
    "budget_usd": ({"used": 1.5, "total": 10, "remaining": 8.5}, "in USD: 1.5/10, 8.5 left"),
    "deferred_tools_delta": (
        {"addedNames": ["fetch"], "addedLines": ["fetch: gets a page"], "removedNames": ["sing"]},
        "searched for:\nfetch: gets a page\n\nTools that are gone:\nsing",
    ),
    "diagnostics": ({"files": [{"uri": "a.ts", "diagnostics": [ISSUE]}]}, "a.ts: no such name"),
    "file": ({"filename": "/p/a.py", "content": FILE}, "/p/a.py\nx = 1"),
    "hook_additional_context": ({"hookName": "H", "content": ["a", "b"]}, "H hook additional context: a\nb"),
    "hook_success": ({"hookName": "H", "hookEvent": "SessionStart", "content": "on main"}, "success: on main"),
    "invoked_skills": (
        {"skills": [{"name": "deploy", "path": "/s", "content": "Ask."}]}, "### deploy\n/s\n\nAsk."
    ),
    "mcp_resource": (
        {"server": "db", "uri": "db://s", "content": {"contents": [{"text": "create table t"}]}},
        "Resource db://s of db:\ncreate table t",
    ),
    "nested_memory": (
        {"path": "/p", "content": {"path": "/p/src", "type": "Project", "content": "Use tabs."}},
        "Contents of /p/src:\n\nUse tabs.",
    ),
    "queued_command": ({"prompt": [{"type": "text", "text": "and hurry"}]}, "and hurry"),
    "task_status": (
        {"taskId": "b1", "taskType": "agent", "status": "running", "description": "look", "deltaSummary": ""},
        "Task b1 (agent, running): look",
    ),
    "teammate_mailbox": (
        {"messages": [{"from": "lead", "text": "stop"}, {"from": "ana"}]}, "team:\nlead: stop"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FIELDS)
def test_an_attachment_that_the_model_saw_is_in_the_prefix(kind: str, tmp_path: Path):
    fields, part = FIELDS[kind]
    log = Log()
    log.user("go")
    log.row("attachment", attachment={"type": kind, **fields})
    log.says("m1", "done")
    state = by_message(ingest(log.write(tmp_path), redact=False), log)["m1"]
    shown = state["messages"][-1]["content"]
    assert shown.removesuffix("\n</system-reminder>").endswith(part)
    assert ("<system-reminder>" in shown) == (kind != "queued_command")
    assert attachments.shown({"type": kind}) == ""


def test_an_attachment_that_is_not_for_the_model_is_not_in_the_prefix():
    for kind in attachments.NEVER_SHOWN | {"hook_success"}:
        fields = {"type": kind, "content": "text", "hookName": "H", "hookEvent": "PostToolUse"}
        assert attachments.shown(fields) == ""


def test_a_long_selection_is_shown_as_the_client_shows_it():
    fields = {"filename": "a", "lineStart": 1, "lineEnd": 9, "content": "x" * 5_000}
    shown = attachments.shown({"type": "selected_lines_in_ide", **fields})
    assert shown is not None
    assert shown.count("x") == 2_000


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("brand_new", "unknown_attachment_brand_new_of_2.1.38"), ("plan_mode", "unlogged_words")],
)
def test_what_the_model_saw_in_unknown_words_is_counted_and_said_of_each_state(
    kind: str, reason: str, tmp_path: Path
):
    log = Log()
    log.user("go")
    log.does("m0")
    log.row("attachment", attachment={"type": kind, "planFilePath": "/p.md"})
    log.says("m1", "done")
    result = ingest(log.write(tmp_path), redact=False)
    assert result.report.skipped == {reason: 1}
    assert result.states["lacks"].to_pylist() == [[], [kind]]
    assert "/p.md" not in result.turns["messages_json"].to_pylist()[-2]


def test_a_picture_that_the_model_saw_is_lacking_from_then_on(tmp_path: Path):
    log = Log()
    log.user("go")
    log.calls("m1", "t1", file_path="a.png")
    log.answers("t1", [{"type": "image", "source": {"type": "base64", "data": "aaaa"}}])
    log.says("m2", "a tide")
    log.user([{"type": "text", "text": "and this?"}, {"type": "document", "source": {}}])
    log.says("m3", {"type": "web_search_tool_result", "content": []}, "found")
    log.user("thanks")
    log.says("m4", "done")
    lacks = ingest(log.write(tmp_path), redact=False).states["lacks"].to_pylist()
    seen = ["document", "image"]
    assert lacks == [[], ["image"], seen, [*seen, "web_search_tool_result"]]


def test_attachments_are_shown_in_the_words_and_the_order_in_which_the_client_shows_them(
    tmp_path: Path,
):
    """From 2.1.280 on the text is logged, and 2.1.280 itself does not say in whose name it was."""
    log = Log(version="2.1.280")

    def told(kind: str, text: str, role: str | None = None, **fields: Any) -> None:
        said = [{"content": text}]
        log.row("attachment", attachment={"type": kind} | fields, rendered=said, renderedRole=role)

    def reminder(text: str) -> str:
        return f"<system-reminder>\n{text}\n</system-reminder>"

    log.user("go")
    told("environment", reminder("You are here."))
    told("brand_new", reminder("Be brief."), "system")
    told("session_context", reminder("It rains."))
    told("remote_session_change", reminder("Sign commits."))
    tool = {"name": "Read", "description": "Reads.", "input_schema": {"type": "object"}}
    snapshot = {"type": "prompt_snapshot", "systemPrompt": ["Act.", "Look first."]}
    log.row("attachment", attachment=snapshot)
    log.does("m1")
    tools = [{"name": "Read", "description": "Reads.", "schema": tool}]
    log.row("attachment", attachment=snapshot | {"cliPrefix": "You are Claude.", "tools": tools})
    told("queued_command", "and hurry", "user", prompt="and hurry")
    log.says("m2", "done")
    result = ingest(log.write(tmp_path), redact=False)
    states = by_message(result, log)
    first = [
        {"role": "system", "content": "You are Claude.\n\nAct.\n\nLook first."},
        {
            "role": "user",
            "content": f"{reminder('It rains.')}\n\n{reminder('Sign commits.')}\n\n\ngo",
        },
        {"role": "system", "content": "You are here.\n\nBe brief."},
    ]
    assert states["m1"]["messages"] == first
    assert states["m2"]["messages"][:3] == first
    assert states["m2"]["messages"][-1] == {"role": "user", "content": "and hurry"}
    assert states["m1"]["system"] == ["You are Claude.", "Act.\n\nLook first."]
    assert [tool["function"] for tool in states["m1"]["tools"]] == [
        {"name": "Read", "description": "Reads.", "parameters": {"type": "object"}}
    ]
    assert {state["fidelity"] for state in states.values()} == {"rebuilt"}
    assert not result.report.skipped


def test_a_session_knows_the_branch_on_which_it_began(tmp_path: Path):
    told = {}
    for branch in ("main", "", None):
        log = Log(f"on-{branch}", **({} if branch is None else {"gitBranch": branch}))
        log.user("go")
        log.does("m1")
        log.common["gitBranch"] = "later"
        log.says("m2", "done")
        (row,) = ingest(log.write(tmp_path), redact=False).sessions.to_pylist()
        told[branch] = row["git_branch"]
    assert told == {"main": "main", "": "", None: "later"}


def test_a_row_of_an_unknown_kind_is_counted_by_its_kind_and_the_version_that_wrote_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    log = Log(version="9.9.9")
    log.user("go")
    log.row("brand-new", uuid=None)
    log.row("brand-new-too", text="?")
    log.says("m1", "done")
    with caplog.at_level(logging.WARNING):
        result = ingest(log.write(tmp_path), redact=False)
    names = {"unknown_row_brand-new_of_9.9.9": 1, "unknown_row_brand-new-too_of_9.9.9": 1}
    assert result.report.skipped == names
    assert all(name in caplog.text for name in names)


@pytest.mark.parametrize(
    "kind",
    ["atis-latch", "cost-state", "file-history-delta", "mode", "permission-mode", "tools-used"],
)
def test_a_row_that_newer_clients_write_for_themselves_is_no_news(kind: str, tmp_path: Path):
    log = Log(version="2.1.332")
    log.user("go")
    log.row(kind, uuid=None)
    log.says("m1", "done")
    assert ingest(log.write(tmp_path), redact=False).report.skipped == {"bookkeeping": 1}


def test_a_local_command_goes_to_the_model(tmp_path: Path):
    log = Log()
    log.user("go")
    log.row(
        "system", subtype="local_command", content="<local-command-stdout>7</local-command-stdout>"
    )
    log.says("m1", "done")
    state = by_message(ingest(log.write(tmp_path), redact=False), log)["m1"]
    assert "<local-command-stdout>7</local-command-stdout>" in state["messages"][-1]["content"]


@pytest.mark.parametrize("is_early", [True, False])
def test_a_large_result_is_shown_as_the_model_saw_it(is_early: bool, tmp_path: Path):
    replaced = {"kind": "tool-result", "toolUseId": "t1", "replacement": "<preview>"}
    log = Log()
    log.user("go")
    log.calls("m1", "t1", file_path="a")
    if is_early:
        log.row("content-replacement", uuid=None, replacements=[replaced])
    log.answers("t1", "x" * 9_000)
    if not is_early:
        log.row("content-replacement", uuid=None, replacements=[replaced])
    log.says("m2", "done")
    states = by_message(ingest(log.write(tmp_path), redact=False), log)
    assert shape(states["m2"]["messages"])[-1] == "t1=<preview>"


def test_a_message_counts_at_least_what_it_took_to_write():
    turn = Turn(None, "assistant", 0, "u", texts=["short"], usage=RecordedUsage(n_output=900))
    assert n_tokens_of(turn) == 900


def turns_of(log: Log) -> list[Turn]:
    from tempfile import TemporaryDirectory

    from replay_pipeline.ingesters.base import ReadCounts
    from replay_pipeline.ingesters.claude_code import ClaudeCode

    with TemporaryDirectory() as folder:
        (one,) = ClaudeCode().read(log.write(Path(folder)), ReadCounts())
    return one.turns


def test_what_the_log_does_not_show_is_fitted_for_each_run_of_the_client():
    log = Log()
    log.user("go")
    log.says("m1", "one", tokens=40_000)
    log.common["version"] = "2.1.39"
    log.user("more")
    log.says("m2", "two", tokens=20_000)
    turns = turns_of(log)
    assert [n == turn.usage.n_context for turn, n in predict_context(turns).items()] == [True] * 2


def test_fidelity_is_told_for_each_client_and_version(tmp_path: Path):
    log = Log()
    log.user("go")
    log.says("m1", "done")
    result = ingest(log.write(tmp_path))
    expected = {"claude_code 2.1.38": {"n_states": 1, "share_within_10_percent": 1.0}}
    assert result.report.fidelity == expected
    assert shares_by_client(result.sessions, result.states) == expected
