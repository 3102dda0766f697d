import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from replay_pipeline.actions.windows import (
    BYTES_PER_TOKEN,
    CLEARED_RESULT,
    OMITTED,
    merged_users,
    parse_window,
)
from replay_pipeline.errors import ConfigError
from replay_pipeline.ingesters import ClaudeCodeIngester
from tests.replay_pipeline.ingesters.logs import Log, assert_results_follow_their_calls

POLICIES = ["full", "clear_tool_results:3", "token_budget:600"]


@pytest.fixture
def session(tmp_path: Path) -> Path:
    log = Log()
    log.user("FIRST REQUEST")
    for i in range(40):
        log.calls(f"m{i}", f"a{i}", file_path=f"f{i}")
        log.calls(f"m{i}", f"b{i}", file_path=f"g{i}")
        log.answers(f"b{i}", f"b-result {i} " + "x" * 40)
        log.answers(f"a{i}", f"a-result {i} " + "y" * 40)
        if i == 20:
            log.row("system", subtype="compact_boundary", parent=None)
            log.user("THE SUMMARY", isCompactSummary=True)
    return log.write(tmp_path)


def states(session: Path, window: str):
    return list(ClaudeCodeIngester(redact=False, window=window).ingest(session))


@pytest.mark.parametrize("window", POLICIES)
def test_no_policy_cuts_between_a_call_and_its_result(session: Path, window: str):
    for state in states(session, window):
        assert_results_follow_their_calls(state["messages"])


@pytest.mark.parametrize("window", POLICIES)
def test_the_first_request_and_the_last_summary_stay(session: Path, window: str):
    found = states(session, window)
    assert all("FIRST REQUEST" in s["messages"][1]["content"] for s in found[:21])
    assert all("THE SUMMARY" in s["messages"][1]["content"] for s in found[21:])


def test_a_token_budget_holds_and_says_that_it_cut(session: Path):
    full = states(session, "full")
    n_cut = 0
    for state, whole in zip(states(session, "token_budget:600"), full, strict=True):
        n_chars = sum(len(str(m["content"])) for m in state["messages"][1:])
        assert n_chars <= 600 * BYTES_PER_TOKEN
        if len(state["messages"]) < len(whole["messages"]):
            n_cut += 1
            assert OMITTED in state["messages"][1]["content"]
    assert n_cut > 10


@pytest.mark.parametrize(
    "text", ["", "half", "full:3", "clear_tool_results", "token_budget:0", "token_budget:x"]
)
def test_an_unknown_window_is_refused_before_any_work(text: str):
    with pytest.raises(ConfigError, match="window"):
        parse_window(text)
    with pytest.raises(ConfigError):
        ClaudeCodeIngester(window=text)


def steps(n: int) -> list[dict[str, Any]]:
    """A prefix of `n` calls below one request."""
    messages = [{"role": "system", "content": "rules"}, {"role": "user", "content": "task"}]
    for i in range(n):
        call = {"id": f"c{i}", "type": "function", "function": {"name": "Read", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        result = f"{i} " + "word " * 60
        messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": result})
    return messages


@pytest.mark.parametrize(
    ("window", "n_cuts"), [("clear_tool_results:5", 3), ("token_budget:1000", 20)]
)
def test_cuts_move_in_blocks_so_that_prefixes_stay_equal(window: str, n_cuts: int):
    windows = [parse_window(window).apply(steps(n)) for n in range(1, 80)]
    n_moved = sum(before != after[: len(before)] for before, after in pairwise(windows))
    # Each cut writes what follows it into the prompt cache again.
    assert 2 <= n_moved <= n_cuts
    for shown in windows:
        assert shown[0] == steps(0)[0]
        assert shown[1]["content"] in {"task", f"task\n\n{OMITTED}"}
        calls = {call["id"] for message in shown for call in message.get("tool_calls") or []}
        assert calls == {m["tool_call_id"] for m in shown if m["role"] == "tool"}


def test_windows_keep_what_they_promise():
    cleared = parse_window("clear_tool_results:5").apply(steps(40))
    kept = [m for m in cleared if m["role"] == "tool" and m["content"] != CLEARED_RESULT]
    assert 5 <= len(kept) < 25
    assert kept[-1]["content"].startswith("39 ")
    shown = parse_window("token_budget:1000").apply(steps(80))
    assert len(json.dumps(shown)) < 1000 * BYTES_PER_TOKEN * 1.1


def test_the_last_step_stays_however_small_the_budget():
    shown = parse_window("token_budget:1").apply(steps(9))
    assert [m["role"] for m in shown] == ["system", "user", "assistant", "tool"]
    assert shown[-1]["content"].startswith("8 ")


def test_what_is_given_is_not_changed():
    given = steps(40)
    for window in ("full", "clear_tool_results:5", "token_budget:1000"):
        parse_window(window).apply(given)
        assert given == steps(40)
    assert parse_window("full").apply(given) == given


def test_a_request_in_parts_is_joined_to_what_follows():
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [
        {"role": "user", "content": [image]},
        {"role": "user", "content": "what is it?"},
        {"role": "assistant", "content": "a tide table"},
    ]
    joined, answer = merged_users(messages)
    assert joined["content"] == [image, {"type": "text", "text": "what is it?"}]
    assert answer == messages[-1]
