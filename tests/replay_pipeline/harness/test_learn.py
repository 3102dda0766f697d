"""A client is asked for its harness on loopback, and ended."""

import json
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.request import Request, urlopen

import msgspec
import pytest

from replay_pipeline.errors import ConfigError
from replay_pipeline.harness import HarnessStore, Moment
from replay_pipeline.harness.clients import version_in
from replay_pipeline.harness.harness import Harness, fill, slots_of
from replay_pipeline.harness.learn import harness_of_request, learn
from replay_pipeline.harness.listener import KeptRequest, Listener

STAND_IN = [sys.executable, str(Path(__file__).with_name("stand_in.py"))]
MOMENT = Moment(cwd="/home/ada/shop", model="claude-opus-4-5", at=datetime(2026, 2, 3, tzinfo=UTC))


@pytest.fixture(scope="module")
def learned() -> Harness:
    return learn(STAND_IN)


def test_what_the_client_fills_in_becomes_slots_and_the_rest_stays(learned):
    (system,) = learned.framings["main"].system
    assert system.splitlines() == [
        "You are a coding client.",
        "Working directory: ⟦cwd⟧",
        "Is directory a git repo: ⟦is_git⟧",
        "Platform: ⟦platform⟧",
        "Today's date: ⟦date⟧",
        "You are powered by the model named ⟦model_name⟧. The exact model ID is ⟦model⟧.",
        "Notes are kept in ⟦home⟧/.client/⟦cwd_slug⟧.",
        "Prefer Grep to grep.",
    ]
    left_out = learned.framings["main"].left_out
    assert [text.split()[0] for text in left_out] == ["(clean)", "Run", "Notes"]
    assert learned.framings["main"].git == (
        "gitStatus: as it was at the start.\nCurrent branch: ⟦git_branch⟧"
    )
    assert learned.version == "9.8.7"


def test_tools_reminders_and_parameters_are_kept_and_nobody_is_named(learned):
    framing = learned.framings["main"]
    assert [tool["function"]["name"] for tool in framing.tools] == ["Read", "Task", "TodoWrite"]
    assert framing.tools[0]["function"]["parameters"]["required"] == ["file_path"]
    assert framing.after == [{"role": "system", "content": "Skills: none."}]
    assert framing.params == {"max_tokens": 32_000}
    assert [tool["function"]["name"] for tool in learned.framings["subagent"].tools] == ["Read"]
    assert b"user-" not in msgspec.json.encode(learned)


def test_the_words_for_a_list_that_was_not_used_are_learned(learned):
    reminder = learned.framings["main"].reminders["todo_reminder"]
    assert reminder.said() == "<system-reminder>\nUse TodoWrite.\n</system-reminder>"
    said = reminder.said([("1", "pending", "Look \\1"), ("2", "completed", "Mend")])
    items = "1. [pending] Look \\1\n2. [completed] Mend"
    assert said == f"<system-reminder>\nUse TodoWrite.\n\nIt has:\n[{items}]\n</system-reminder>"
    assert learned.framings["subagent"].reminders == {}  # it has no such list


def test_slots_are_filled_from_the_log_and_what_it_does_not_tell_is_left_out(learned):
    filled = fill(learned.framings["main"], MOMENT)
    assert filled.system[0].splitlines() == [
        "You are a coding client.",
        "Working directory: /home/ada/shop",
        "Platform: linux",
        "Today's date: 2026-02-03",
        "You are powered by the model named Opus 4.5. The exact model ID is claude-opus-4-5-20251101.",
        "Notes are kept in /home/ada/.client/-home-ada-shop.",
        "Prefer Grep to grep.",
    ]
    assert filled.unfilled == {"is_git", "git_branch"}
    other = fill(learned.framings["main"], Moment(cwd="/srv/x", model="claude-sonnet-4-20250514"))
    assert (
        "model named Sonnet 4. The exact model ID is claude-sonnet-4-20250514." in other.system[0]
    )
    assert other.unfilled == {"is_git", "git_branch", "platform", "date", "home"}


@pytest.mark.parametrize(
    ("branch", "is_git", "last"),
    [
        ("tide", "Yes", ["", "gitStatus: as it was at the start.", "Current branch: tide"]),
        ("", "No", []),
        ("HEAD", None, []),
    ],
)
def test_the_git_status_is_told_up_to_the_branch(learned, branch, is_git, last):
    filled = fill(learned.framings["main"], replace(MOMENT, branch=branch))
    lines = filled.system[0].splitlines()
    said = [line.rpartition(" ")[2] for line in lines if line.startswith("Is directory a git")]
    assert said == ([is_git] if is_git else [])
    assert lines[lines.index("Prefer Grep to grep.") + 1 :] == last


def test_the_words_for_plan_mode_are_learned_and_stand_nowhere_else(learned):
    main = learned.framings["main"]
    assert main.before == []
    assert main.plan.said("/x/plans/a.md") == (
        "<system-reminder>\nPlan mode is active.\nWrite to /x/plans/a.md alone.\nAsk.\n</system-reminder>\n"
    )
    assert "Write" not in main.plan.said(None)
    assert "\nIt is in a.md.\nAsk." in main.plan.said("a.md", "It is in a.md.")
    assert learned.framings["subagent"].plan is None


def test_the_users_home_is_not_touched(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "aside"))
    (tmp_path / "aside").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    learn(STAND_IN)
    assert [path.name for path in tmp_path.rglob("*")] == ["aside"]


@pytest.mark.parametrize("how", ["hangs", "asks", "says nothing"])
def test_a_client_that_sends_nothing_is_ended_in_time_and_says_why(how, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    begun = time.monotonic()
    with pytest.raises(
        ConfigError, match="sent no request within 4 s, so it was stopped"
    ) as caught:
        learn(
            [*STAND_IN, how], timeout_s=4.0
        )  # Python takes more than one to start on a busy machine
    assert time.monotonic() - begun < 30
    assert list(tmp_path.iterdir()) == []
    assert ("no answer" in str(caught.value)) == (how == "says nothing")


def test_what_a_client_has_started_is_ended_with_it(tmp_path, monkeypatch):
    mark = f"mark-{time.monotonic_ns()}"
    program = tmp_path / "client"
    program.write_text(
        f"#!/bin/sh\nMARK={mark} exec {' '.join(STAND_IN)} 'leaves a child' \"$@\"\n"
    )
    program.chmod(0o755)
    with pytest.raises(ConfigError):
        learn([str(program)], timeout_s=1.0)

    def is_left() -> bool:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if mark.encode() in path.read_bytes():
                    return True
            except OSError:
                continue
        return False

    deadline = time.monotonic() + 5
    while is_left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_left()


def test_a_program_that_is_not_there_is_a_sentence():
    with pytest.raises(ConfigError, match="/no/such/client: cannot be started"):
        learn(["/no/such/client"])
    with pytest.raises(ConfigError, match="agent 'nobody' is not one of claude_code"):
        learn(STAND_IN, agent="nobody")


def test_a_recorded_request_is_a_harness_too(learned):
    body = {
        "model": "claude-opus-4-5-20251101",
        "system": [
            {"type": "text", "text": "Be brief.\nWorking directory: /x/y\nLook in /x/y first."}
        ],
        "tools": [{"name": "Read", "input_schema": {"type": "object"}}],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": t} for t in ("Reminder.", "Hello")],
            }
        ],
    }
    framing = harness_of_request(body, version="1.2.3").framings["main"]
    assert framing.system == ["Be brief.\nWorking directory: ⟦cwd⟧\nLook in ⟦cwd⟧ first."]
    assert framing.before == ["Reminder."]
    with pytest.raises(ConfigError, match="not the request of a conversation"):
        harness_of_request({"messages": []}, version="1.2.3")


def test_a_request_of_gemini_is_read():
    tool = {
        "name": "glob",
        "description": "Finds files.",
        "parametersJsonSchema": {"type": "object"},
    }
    context = "Today's date is Tuesday, November 3, 2026.\nMy operating system is: linux"
    parts = [{"text": context}, {"text": "Hello"}]
    body = {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "tools": [{"functionDeclarations": [tool]}],
        "contents": [{"role": "user", "parts": parts}],
        "generationConfig": {"topK": 64},
    }
    framing = harness_of_request(body, version="0.61.0", agent="gemini_cli").framings["main"]
    assert framing.system == ["Be brief."]
    marked = context.replace("linux", "⟦platform⟧")
    assert framing.before == [marked.replace("Tuesday, November 3, 2026", "⟦long_date⟧")]
    assert framing.tools[0]["function"] == {
        "name": "glob", "description": "Finds files.", "parameters": {"type": "object"}
    }  # fmt: skip
    assert framing.params == {"generationConfig": {"topK": 64}}


def test_a_stream_of_gemini_is_answered_and_kept():
    with Listener(lambda _: ()) as server:
        for way in ("streamGenerateContent", "generateContent"):
            url = f"{server.url}/v1beta/models/any:{way}?alt=sse"
            with urlopen(Request(url, b'{"contents": []}'), timeout=5) as reply:
                (text,) = [line for line in reply.read().decode().splitlines() if line]
            answer = json.loads(text.removeprefix("data: "))
            assert answer["candidates"][0]["content"]["parts"] == [{"text": "Done."}]
        assert [kept.path.rpartition(":")[2] for kept in server.kept] == [
            "streamGenerateContent", "generateContent"
        ]  # fmt: skip


def test_the_version_of_a_library_is_not_the_clients():
    said = {"OpenAI/JS 5.20.1": None, "GeminiCLI-tui/0.61.0/any (linux; x64)": "0.61.0"}
    for agent, version in said.items():
        assert version_in(KeptRequest("/", {"user-agent": agent}, {})) == version


def test_the_nearest_older_version_stands_in_with_a_note(tmp_path, learned):
    store = HarnessStore(tmp_path)
    assert store.is_empty
    for version in ("2.1.20", "2.1.9", "2.0.64"):
        store.keep(
            Harness(agent="claude_code", version=version, how="asked", framings=learned.framings)
        )
    store = HarnessStore(tmp_path)
    assert [each.version for each in store] == ["2.0.64", "2.1.9", "2.1.20"]
    found = store.find("claude_code", "2.1.20")
    assert found.note is None
    assert found.harness.framings == learned.framings
    older = store.find("claude_code", "2.1.19")
    assert (older.harness.version, "nearest older version" in older.note) == ("2.1.9", True)
    for agent, version in (("claude_code", "2.0.1"), ("codex", "2.1.20"), ("claude_code", None)):
        assert store.find(agent, version) is None


def test_slots_are_named(learned):
    assert slots_of(learned.framings["main"]) == [
        "cwd", "cwd_slug", "date", "git_branch", "home", "is_git", "model", "model_name", "platform"
    ]  # fmt: skip
