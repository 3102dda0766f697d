"""The bundled sample is reproducible, complete, and shows what its README promises."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.stages.views.status import status_of
from replay_pipeline.testing.sample import ANSWERS_FILE, SESSIONS_DIR
from tests.roots import pipeline_at, sample_root
from tests.support.sessions import REJECTED, SessionBuilder, ToolCall, state_id

REPO = Path(__file__).parents[2]
TEACHERS = {"deepseek/deepseek-v4-pro", "qwen/qwen3-coder", "z-ai/glm-4.6"}
Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def sessions() -> Rows:
    """The rows of every file, by path; a subagent's file is its own entry."""
    return {
        str(path.relative_to(SESSIONS_DIR)): read_lines(path)
        for path in sorted(SESSIONS_DIR.rglob("*.jsonl"))
    }


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return read_lines(ANSWERS_FILE)


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Any]]:
    return json.loads((REPO / "recipes/sample/expected.json").read_text("utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def messages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """User and assistant rows, those inside `agent_progress` rows included."""
    inner = [
        row["data"]["message"]
        for row in rows
        if row["type"] == "progress" and row["data"]["type"] == "agent_progress"
    ]
    return [row for row in rows if row["type"] in ("user", "assistant")] + inner


def state_ids(sessions: Rows) -> set[str]:
    return {
        state_id(row["message"]["id"])
        for rows in sessions.values()
        for row in messages(rows)
        if row["type"] == "assistant"
    }


def blocks(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [
        block
        for row in messages(rows)
        if isinstance(row["message"]["content"], list)
        for block in row["message"]["content"]
        if block["type"] == kind
    ]


def session_of(name: str) -> str:
    """The session's id part of a path: main file and subagents share it."""
    return name.split("/")[1].removesuffix(".jsonl")


@pytest.mark.slow
def test_building_again_gives_the_same_bytes(tmp_path: Path):
    build = [sys.executable, "-B", "recipes/sample/build.py", "--out", tmp_path / "sample"]
    subprocess.run(
        [*build, "--expected", tmp_path / "expected.json"],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        check=True,
        capture_output=True,
    )
    bundled = SESSIONS_DIR.parent
    built = {p.relative_to(tmp_path / "sample"): p for p in (tmp_path / "sample").rglob("*.*")}
    kept = {
        path.relative_to(bundled)
        for path in bundled.rglob("*.*")
        if path.suffix in {".jsonl", ".json", ".md"}
    }
    assert {path for path in built if built[path].is_file()} == kept
    for name in kept:
        assert built[name].read_bytes() == (bundled / name).read_bytes(), name
    expected = REPO / "recipes/sample/expected.json"
    assert (tmp_path / "expected.json").read_bytes() == expected.read_bytes()


def test_there_are_enough_sessions_projects_and_states(sessions: Rows):
    mains = [name for name in sessions if "/subagents/" not in name]
    assert len(mains) >= 20
    assert 3 <= len({name.split("/")[0] for name in mains}) <= 4
    assert len(state_ids(sessions)) >= 400


def test_the_readme_counts_logs_and_sessions():
    states = list(ClaudeCodeIngester().ingest(SESSIONS_DIR))
    sessions = {state["session_id"] for state in states}
    n_logs = len([*SESSIONS_DIR.glob("*/*.jsonl")])
    text = " ".join((SESSIONS_DIR.parent / "README.md").read_text("utf-8").split())
    assert f"{n_logs} Claude Code session logs with {len(states)} decision states" in text
    assert f"the work of {sum('.agent-' in each for each in sessions)} subagents" in text
    # Read all at once, a log that another holds whole is no session of its own.
    assert f"the demo counts {len(sessions) + 1} sessions" in text
    assert f"They are {len({state['conversation'] for state in states})} conversations" in text


def test_a_fork_a_resumed_session_and_subagents_belong_to_what_they_came_from(sessions: Rows):
    began = {log.session_id for log in map(SessionBuilder, ("stacks-holds", "kiln-monday"))}
    fork, resumed = map(SessionBuilder, ("stacks-holds, forked", "kiln-monday-resumed"))
    rows = {session_of(name): rows for name, rows in sessions.items() if "subagents" not in name}
    assert all("forkedFrom" in row for row in rows[fork.session_id][:5] if "uuid" in row)
    assert not any("forkedFrom" in row for row in rows[resumed.session_id])
    of_session: dict[str, set[str]] = defaultdict(set)
    for state in ClaudeCodeIngester().ingest(SESSIONS_DIR):
        of_session[state["conversation"]].add(state["session_id"])
    assert {len(of_session[each]) for each in began} == {1, 2}
    several = {root: ids for root, ids in of_session.items() if ids != {root}}
    assert {each for ids in several.values() for each in ids} - {*several} == {
        fork.session_id,
        resumed.session_id,
        *(each for ids in of_session.values() for each in ids if ".agent-" in each),
    }
    assert len(several) == 4


def test_every_state_has_one_answer_of_each_teacher(
    sessions: Rows, answers: list[dict[str, Any]], expected: dict[str, dict[str, Any]]
):
    asked = defaultdict(list)
    for answer in answers:
        asked[answer["state_id"]].append(answer["model"])
    assert set(asked) == state_ids(sessions) == set(expected)
    assert all(len(models) == 3 and set(models) == TEACHERS for models in asked.values())


def test_agreeing_teachers_seldom_use_the_same_bytes(
    answers: list[dict[str, Any]], expected: dict[str, dict[str, Any]]
):
    spelled = defaultdict(list)
    for answer in answers:
        if answer["model"] in expected[answer["state_id"]]["teachers"]:
            calls = [
                (call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in answer["message"]["tool_calls"]
            ]
            spelled[answer["state_id"]].append(json.dumps(calls, sort_keys=True))
    n_equal = sum(len(set(forms)) < len(forms) for forms in spelled.values())
    assert n_equal <= len(spelled) / 5


def test_both_eras_have_the_rows_they_are_known_for(sessions: Rows):
    old, new = [], []
    for rows in sessions.values():
        version = next(row["version"] for row in rows if "version" in row)
        is_old = tuple(map(int, version.split("."))) < (2, 1, 100)
        (old if is_old else new).extend(rows)
    for rows, wanted, foreign in ((old, "progress", "attachment"), (new, "attachment", "progress")):
        types = {row["type"] for row in rows}
        assert wanted in types
        assert foreign not in types
    old_bodies = [row["message"] for row in messages(old) if row["type"] == "assistant"]
    assert {body["stop_reason"] for body in old_bodies} == {None}
    assert all(block["thinking"] for block in blocks(old, "thinking"))
    assert {row["data"]["type"] for row in old if row["type"] == "progress"} == {
        "agent_progress",
        "bash_progress",
        "hook_progress",
    }
    new_bodies = [row["message"] for row in messages(new) if row["type"] == "assistant"]
    assert {body["stop_reason"] for body in new_bodies} == {None, "tool_use", "end_turn"}
    assert not any(block["thinking"] for block in blocks(new, "thinking"))
    assert all(block["signature"] for block in blocks(new, "thinking"))
    assert any("permissionMode" in row and "promptId" in row for row in new)


def test_bookkeeping_rows_are_there(sessions: Rows):
    rows = [row for rows in sessions.values() for row in rows]
    kinds = {row["type"] for row in rows if "uuid" not in row}
    assert kinds >= {"file-history-snapshot", "summary", "queue-operation", "ai-title"}
    assert any(row.get("isMeta") for row in rows if row["type"] == "user")


def test_a_message_has_parallel_calls_with_a_result_in_between(sessions: Rows):
    n_parallel, n_split = 0, 0
    for rows in sessions.values():
        positions = defaultdict(list)
        by_uuid = {row["uuid"]: row for row in rows if "uuid" in row}
        for idx, row in enumerate(rows):
            if row["type"] == "assistant" and blocks([row], "tool_use"):
                positions[row["message"]["id"]].append(idx)
            for result in blocks([row], "tool_result") if row["type"] == "user" else []:
                [use] = blocks([by_uuid[row["parentUuid"]]], "tool_use")
                assert use["id"] == result["tool_use_id"]
        for found in positions.values():
            between = rows[found[0] : found[-1]]
            n_parallel += len(found) > 1
            n_split += any(row["type"] == "user" for row in between)
    assert n_parallel >= 3
    assert n_split >= 1


def test_tools_fail_in_every_usual_way(sessions: Rows):
    errors = "\n".join(
        str(block["content"])
        for rows in sessions.values()
        for block in blocks(rows, "tool_result")
        if block.get("is_error")
    )
    for text in (
        "String to replace not found in file.",
        "File has not been read yet.",
        "File does not exist.",
        "Exit code 1\n",
        f"{REJECTED} To tell you how to proceed, the user said:\n",
    ):
        assert text in errors


def test_rejections_interrupts_and_queued_messages_are_marked(sessions: Rows):
    rows = [row for rows in sessions.values() for row in rows]
    assert any(row.get("toolDenialKind") == "user-rejected" for row in rows)
    assert any(row.get("userFeedback") for row in rows)
    assert any(row.get("interruptedMessageId") for row in rows)
    kinds = {row["attachment"]["type"] for row in rows if row["type"] == "attachment"}
    assert "queued_command" in kinds


def test_both_eras_compact(sessions: Rows):
    boundaries = []
    for rows in sessions.values():
        uuids = {row.get("uuid") for row in rows}
        for row, after in pairwise(rows):
            if row.get("subtype") == "compact_boundary":
                boundaries.append(row)
                assert row["parentUuid"] is None
                assert row["logicalParentUuid"] in uuids
                assert after["isCompactSummary"]
                assert after["parentUuid"] == row["uuid"]
    assert {"postTokens" in row["compactMetadata"] for row in boundaries} == {True, False}


def test_a_user_message_was_sent_twice_from_the_same_place(sessions: Rows):
    sent = [
        (name, row["parentUuid"], row["message"]["content"])
        for name, rows in sessions.items()
        for row in rows
        if row["type"] == "user" and isinstance(row["message"]["content"], str)
    ]
    assert len(sent) == len(set(sent)) + 1


def test_subagents_live_in_files_and_in_progress_rows(sessions: Rows):
    [name] = [name for name in sessions if "/subagents/" in name]
    assert all(row["isSidechain"] and row["agentId"] for row in sessions[name])
    described = json.loads((SESSIONS_DIR / name).with_suffix(".meta.json").read_text("utf-8"))
    parent = sessions[name.split("/subagents/")[0] + ".jsonl"]
    assert described["toolUseId"] in {block["id"] for block in blocks(parent, "tool_use")}
    progress = [row for rows in sessions.values() for row in rows if row["type"] == "progress"]
    agents = {row["data"].get("agentId") for row in progress}
    assert len(agents - {None}) == 1


def test_every_parent_comes_before_its_row(sessions: Rows):
    for name, rows in sessions.items():
        seen = set()
        for row in rows:
            if "uuid" in row:
                assert row["parentUuid"] is None or row["parentUuid"] in seen, name
                assert row["uuid"] not in seen
                seen.add(row["uuid"])


def test_recorded_context_grows_with_the_prefix(sessions: Rows):
    rewound = SessionBuilder("csvmend-quotes").session_id
    for rows in sessions.values():
        previous = 0
        for row in rows:
            if row.get("subtype") == "compact_boundary" or row["type"] == "summary":
                previous = 0
            if row["type"] == "assistant":
                usage = row["message"]["usage"]
                n_tokens = (
                    usage["input_tokens"]
                    + usage["cache_creation_input_tokens"]
                    + usage["cache_read_input_tokens"]
                )
                assert n_tokens > 6_000
                has_shrunk = n_tokens < previous
                assert not has_shrunk or row["sessionId"] == rewound
                previous = n_tokens


def test_a_planted_secret_is_in_a_tool_output(sessions: Rows):
    outputs = [
        str(block["content"]) for rows in sessions.values() for block in blocks(rows, "tool_result")
    ]
    assert any(re.search(r"AWS_SECRET_ACCESS_KEY=\w{40}\n", output) for output in outputs)
    assert any("postgres://stacks:" in output for output in outputs)


def test_old_strings_of_feasible_answers_are_in_a_file_that_the_session_showed(
    sessions: Rows, answers: list[dict[str, Any]], expected: dict[str, dict[str, Any]]
):
    shown: dict[str, str] = defaultdict(str)
    session_of_state = {}
    for name, rows in sessions.items():
        session = session_of(name)
        for row in messages(rows):
            if row["type"] == "assistant":
                session_of_state[state_id(row["message"]["id"])] = session
        shown[session] += "\n".join(file_versions(rows))
    n_edits = 0
    for answer in answers:
        if expected[answer["state_id"]]["outcome"] == "infeasible":
            continue
        for call in answer["message"]["tool_calls"]:
            if call["function"]["name"] != "Edit" or answer["note"].endswith("arguments"):
                continue
            old = json.loads(call["function"]["arguments"])["old_string"]
            assert old in shown[session_of_state[answer["state_id"]]], old
            n_edits += 1
    assert n_edits > 40


def file_versions(rows: list[dict[str, Any]]) -> list[str]:
    """Every content that the model saw or made: reads without line numbers, then edits."""
    contents: dict[str, str] = {}
    versions = []
    uses = {block["id"]: block for block in blocks(rows, "tool_use")}
    for result in blocks(rows, "tool_result"):
        use = uses[result["tool_use_id"]]
        if result.get("is_error"):
            continue
        args, path = use["input"], use["input"].get("file_path", "")
        match use["name"]:
            case "Read":
                lines = str(result["content"]).split("\n")
                contents[path] = "\n".join(re.sub(r"^ *\d+[\t→]", "", line) for line in lines)
            case "Edit":
                assert args["old_string"] in contents[path]
                contents[path] = contents[path].replace(args["old_string"], args["new_string"])
            case "Write":
                contents[path] = args["content"]
        versions.append(contents.get(path, "") + "\n")
    return versions


def test_unusable_answers_are_few_and_say_why(answers: list[dict[str, Any]]):
    unusable = [answer["note"] for answer in answers if answer["note"] != "written for the sample"]
    assert len(unusable) <= 15
    assert {note.split(": ")[1] for note in unusable} == {
        "malformed arguments",
        "unknown tool",
        "cut at the length limit",
    }
    assert {answer["finish_reason"] for answer in answers} == {"tool_calls", "stop", "length"}


def test_people_and_hosts_are_invented(sessions: Rows):
    text = "\n".join(
        json.dumps(rows, ensure_ascii=False).replace("\\n", "\n") for rows in sessions.values()
    )
    hosts = re.findall(r"(?:\w@|//)([a-z0-9.-]+\.[a-z]{2,})", text)
    assert hosts
    assert all(host.endswith(("example.com", ".internal")) for host in hosts)


def test_a_builder_writes_the_same_rows_twice_and_other_ids_under_another_name():
    def told(name: str) -> list[str]:
        log = SessionBuilder(name)
        log.user("Hello")
        message = log.assistant("Looking.", [ToolCall("Read", {"file_path": "a.py"})])
        log.result(message.tool_use_ids[0], "1\tpass")
        return log.lines()

    assert told("a") == told("a")
    ids = {json.loads(line)["uuid"] for line in told("a")}
    assert ids.isdisjoint(json.loads(line)["uuid"] for line in told("b"))


def test_a_preserved_segment_is_named_by_the_boundary():
    log = SessionBuilder("preserved")
    log.user("Hello")
    kept = log.assistant("Good morning.").first_uuid
    log.compact("They greeted each other.", preserved=[kept])
    boundary, summary = (json.loads(line) for line in log.lines()[-2:])
    segment = boundary["compactMetadata"]["preservedSegment"]
    assert segment == {"headUuid": kept, "anchorUuid": summary["uuid"], "tailUuid": kept}


@pytest.mark.slow
def test_other_default_teachers_leave_the_sample_as_it_is(tmp_path):
    other = [{"name": "new", "model": "vendor/new-model"}]
    found = []
    for folder, changes in (("as_it_is", {}), ("others", {"teachers": other})):
        sample_root(tmp_path / folder)
        work = pipeline_at(tmp_path / folder, replay={"sample_teachers": True, **changes})
        work.find_batches()
        batch = work.batches()[0]
        work.ingest(batch)
        work.replay(batch)
        answers = work.root.read("teacher_actions", batch)
        asked = answers.select(["state_id", "teacher", "request_sha", "action_text", "cost_usd"])
        found.append((asked, status_of(work)["teachers"]))
    assert found[0] == found[1]
    assert len(set(found[0][0]["teacher"].to_pylist())) == len(TEACHERS)
