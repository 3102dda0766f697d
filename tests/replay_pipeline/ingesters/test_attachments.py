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

HOOK = {"hookName": "SessionStart:startup", "hookEvent": "SessionStart", "toolUseID": "h1"}
FIELDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "agent_listing_delta": (
        {"addedLines": ["- scout: looks around"], "removedTypes": ["old"], "isInitial": True},
        ("- scout: looks around", "old"),
    ),
    "async_hook_response": (
        {
            **HOOK,
            "response": {
                "systemMessage": "lint first",
                "hookSpecificOutput": {"additionalContext": "branch is main"},
            },
        },
        ("lint first", "branch is main"),
    ),
    "budget_usd": ({"used": 1.5, "total": 10, "remaining": 8.5}, ("1.5/10", "8.5")),
    "compact_file_reference": ({"filename": "/p/a.py", "displayPath": "a.py"}, ("/p/a.py",)),
    "critical_system_reminder": ({"content": "never push"}, ("never push",)),
    "deferred_tools_delta": (
        {"addedNames": ["fetch"], "addedLines": ["fetch: gets a page"], "removedNames": ["sing"]},
        ("fetch: gets a page", "sing"),
    ),
    "diagnostics": (
        {
            "files": [
                {
                    "uri": "file:///p/a.ts",
                    "diagnostics": [
                        {
                            "message": "no such name",
                            "severity": "Error",
                            "range": {"start": {"line": 41, "character": 2}},
                        }
                    ],
                }
            ],
            "isNew": True,
        },
        ("a.ts", "41", "Error", "no such name"),
    ),
    "directory": ({"path": "/p/src", "content": "a.py\nb.py"}, ("/p/src", "a.py\nb.py")),
    "edited_text_file": ({"filename": "/p/a.py", "snippet": "3 x = 1"}, ("/p/a.py", "3 x = 1")),
    "file": (
        {
            "filename": "/p/a.py",
            "content": {"type": "text", "file": {"filePath": "/p/a.py", "content": "x = 1"}},
        },
        ("/p/a.py", "x = 1"),
    ),
    "hook_additional_context": (
        {**HOOK, "content": ["on main", "3 open tasks"]},
        ("SessionStart:startup", "on main\n3 open tasks"),
    ),
    "hook_blocking_error": (
        {**HOOK, "blockingError": {"blockingError": "lint failed", "command": "lint"}},
        ("lint failed",),
    ),
    "hook_stopped_continuation": ({**HOOK, "message": "budget used up"}, ("budget used up",)),
    "hook_success": ({**HOOK, "content": "shop: 4 branches"}, ("shop: 4 branches",)),
    "invoked_skills": (
        {"skills": [{"name": "deploy", "path": "/s/deploy", "content": "Ask first."}]},
        ("deploy", "/s/deploy", "Ask first."),
    ),
    "mcp_instructions_delta": (
        {"addedNames": ["db"], "addedBlocks": ["## db\nRead only."], "removedNames": ["mail"]},
        ("## db\nRead only.", "mail"),
    ),
    "mcp_resource": (
        {
            "server": "db",
            "uri": "db://schema",
            "content": {
                "contents": [
                    {"uri": "db://schema", "text": "create table t"},
                    {"uri": "db://logo", "blob": "aaaa", "mimeType": "image/png"},
                ]
            },
        },
        ("db://schema", "create table t", "[image/png]"),
    ),
    "memory": ({"path": "/p/CLAUDE.md", "content": "Use tabs."}, ("/p/CLAUDE.md", "Use tabs.")),
    "nested_memory": (
        {
            "path": "/p/src/CLAUDE.md",
            "content": {"path": "/p/src/CLAUDE.md", "type": "Project", "content": "Use tabs."},
        },
        ("/p/src/CLAUDE.md", "Use tabs."),
    ),
    "new_directory": ({"path": "/p/new", "content": "a.py"}, ("/p/new", "a.py")),
    "new_file": (
        {"filename": "/p/a.py", "content": {"type": "text", "file": {"content": "x = 1"}}},
        ("/p/a.py", "x = 1"),
    ),
    "opened_file_in_ide": ({"filename": "/p/a.py"}, ("/p/a.py",)),
    "output_token_usage": ({"turn": 10, "session": 99, "budget": None}, ("10", "99")),
    "pdf_reference": ({"filename": "/p/a.pdf", "pageCount": 80}, ("/p/a.pdf", "80")),
    "plan_file_reference": (
        {"planFilePath": "/plans/a.md", "planContent": "1. Look"},
        ("/plans/a.md", "1. Look"),
    ),
    "queued_command": ({"prompt": [{"type": "text", "text": "and hurry"}]}, ("and hurry",)),
    "read_truncation_notice": ({"filename": "/p/a.log", "content": "cut"}, ("/p/a.log", "cut")),
    "relevant_memories": (
        {"memories": [{"path": "/m/a.md", "content": "She likes tabs.", "mtimeMs": 1}]},
        ("/m/a.md", "She likes tabs."),
    ),
    "selected_lines_in_ide": (
        {"filename": "/p/a.py", "lineStart": 3, "lineEnd": 4, "content": "x = 1", "ideName": "IDE"},
        ("3 to 4", "/p/a.py", "x = 1"),
    ),
    "session_context": ({"context": {"gitStatus": "On main."}}, ("On main.",)),
    "skill_listing": ({"content": "- deploy: ships it", "skillCount": 1}, ("- deploy: ships it",)),
    "task_status": (
        {
            "taskId": "b1",
            "taskType": "local_agent",
            "status": "running",
            "description": "look around",
            "deltaSummary": "half way",
        },
        ("b1", "running", "look around", "half way"),
    ),
    "teammate_mailbox": ({"messages": [{"from": "lead", "text": "stop"}]}, ("lead: stop",)),
    "token_usage": ({"used": 10, "total": 200, "remaining": 190}, ("10/200", "190")),
    "total_tokens_reminder": ({"content": "12 tokens"}, ("12 tokens",)),
}


@pytest.mark.parametrize("kind", sorted(attachments.SHOWN))
def test_an_attachment_that_the_model_saw_is_in_the_prefix(kind: str, tmp_path: Path):
    fields, parts = FIELDS[kind]
    log = Log()
    log.user("go")
    log.row("attachment", attachment={"type": kind, **fields})
    log.says("m1", "done")
    state = by_message(ingest(log.write(tmp_path), redact=False), log)["m1"]
    shown = state["messages"][-1]["content"]
    for part in parts:
        assert part in shown
    assert ("<system-reminder>" in shown) == (kind != "queued_command")


@pytest.mark.parametrize("kind", sorted(attachments.NEVER_SHOWN | {"hook_success"}))
def test_an_attachment_that_is_not_for_the_model_is_not_in_the_prefix(kind: str):
    fields = {"type": kind, "content": "text", **HOOK, "hookEvent": "PostToolUse"}
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
