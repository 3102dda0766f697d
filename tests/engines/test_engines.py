"""The client against servers that share none of its assumptions.

What they do here is what the loopback server is held to: it refuses what they refuse.
"""

import json
import threading

import pytest

from replay_pipeline.replay import (
    estimate,
    ledger_status,
    lost_calls,
    replay_in_thread,
)
from replay_pipeline.settings import Settings
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.testing.sample import SESSIONS_DIR
from replay_pipeline.types import RetryPolicy
from tests.engines.cases import CASES, READ, RECORDED, TOO_LONG, body_of, shape
from tests.engines.conftest import served

SHORT = {"max_completion_tokens": 8}


def call(name, number):
    function = {"name": "Read", "arguments": json.dumps({"file_path": name})}
    return {"id": f"call_{number}", "type": "function", "function": function}


def states(n=3, words=20, tag="s"):
    """A session whose prefix grows by a call and its result."""
    messages = [
        {"role": "system", "content": "You read files."},
        {"role": "user", "content": f"What is in cart.py? ({tag}) " + "word " * words},
    ]
    made = []
    for i in range(n):
        made.append(
            {
                "state_id": f"{tag}{i}", "session_id": tag, "turn_idx": i, "messages": list(messages),
                "student_action": {"role": "assistant", "content": "", "tool_calls": [call("a.py", i)]},
                "tools": [READ],
            }
        )  # fmt: skip
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call("a.py", i)]},
            {"role": "tool", "tool_call_id": f"call_{i}", "content": f"x = {i}"},
        ]
    return made


def replayed(engine, asked, ledger, **options):
    return replay_in_thread(
        asked, [engine.teacher], max_total_usd=1.0, ledger=ledger, **SHORT, **options
    )


def test_a_session_with_calls_is_estimated_replayed_and_taken_up_again(engine, tmp_path):
    ledger = tmp_path / "ledger.sqlite"
    expected = estimate(states(), [engine.teacher], **SHORT)
    report = replayed(engine, states(), ledger)
    assert report.n_sent == 3
    codes = {row.error_code for row in report.actions}
    # A model of this size may ramble until it is cut off; the call itself is right all the same.
    assert codes <= {None, "cut_off", "malformed_arguments", "empty_answer"}
    counted = [row for row in report.actions if row.error_code in (None, "cut_off")]
    assert all(row.n_prompt_tokens and row.n_completion_tokens for row in counted)
    assert 0 < report.spent_usd <= expected.bound_usd
    again = replayed(engine, states(), ledger)
    assert again.n_sent == sum(row.error_code == "empty_answer" for row in report.actions)
    assert ledger_status(ledger).held_usd == 0


def test_a_long_prompt_is_read_whole_or_is_a_row_that_says_why(engine, tmp_path):
    # The context of llama.cpp's server is 4,096 tokens here, that of the other one 8,192.
    n_words = 5_000 if engine.name == "llama.cpp" else 700
    long, short = states(1, words=n_words, tag="long"), states(1, tag="short")
    report = replayed(engine, [*long, *short], tmp_path / "ledger.sqlite")
    rows = {row.state_id: row for row in report.actions}
    assert rows.keys() == {"long0", "short0"}
    assert rows["short0"].error_code in (None, "cut_off")
    if engine.name == "llama.cpp":
        assert rows["long0"].error_code == "context_length_exceeded"
    else:
        assert rows["long0"].n_prompt_tokens > n_words


@pytest.mark.parametrize("case", CASES)
def test_a_real_server_answers_as_it_was_recorded(engine, case):
    # What is recorded is what the loopback server is held to, in tests/replay_pipeline/testing.
    known = [
        each
        for each in json.loads(RECORDED.read_text("utf-8"))
        if each["case"] == case and each["server"].startswith(engine.name)
    ]
    for each in known:
        status, reply = engine.post(body_of(case, engine.teacher.model))
        assert status == each["status"]
        if status >= 400:
            assert shape(reply) == shape(each["reply"])
        else:
            assert shape(reply["usage"]) == shape(each["reply"]["usage"])
    assert known or (engine.name, case) == ("transformers", TOO_LONG)


def test_a_run_that_is_told_to_stop_keeps_what_is_paid_for(engine, tmp_path):
    stop = threading.Event()
    ledger = tmp_path / "ledger.sqlite"
    report = replayed(
        engine,
        states(6, tag="stop"),
        ledger,
        stop=stop,
        tick=lambda progress: stop.set() if progress.n_done else None,
        tick_s=0.05,
    )
    assert report.stop_reason == "stopped"
    assert 1 <= report.n_sent < 6
    assert len(report.actions) == report.n_sent
    status = ledger_status(ledger)
    assert (status.held_usd, status.unknown_usd) == (0, 0)
    rest = replayed(engine, states(6, tag="stop"), ledger)
    assert rest.n_sent == 6 - len(
        [row for row in report.actions if row.error_code != "empty_answer"]
    )


def test_a_server_that_is_killed_in_mid_call_leaves_rows_and_no_held_money(tmp_path):
    ledger = tmp_path / "ledger.sqlite"
    with served("llama.cpp", tmp_path) as engine:
        seen = []

        def kill(progress):
            seen.append(progress)
            if len(seen) == 3:
                engine.process.kill()

        asked = states(4, words=900, tag="kill")
        report = replay_in_thread(
            asked, [engine.teacher], max_total_usd=1.0, ledger=ledger, tick=kill, tick_s=0.2,
            max_completion_tokens=400, retry=RetryPolicy(max_attempts=1, settle_s=0),
        )  # fmt: skip
    assert len(report.actions) + sum(report.skipped.values()) == 4
    assert any(row.error_code for row in report.actions)
    status = ledger_status(ledger)
    assert status.held_usd == 0
    assert len(lost_calls(ledger)) == status.calls.get("unknown", 0)


def test_the_sample_runs_end_to_end_with_two_real_models(engines, tmp_path):
    # Models of this size on two cores take seconds a prompt: one session, where its steps failed.
    [session, *_] = sorted(SESSIONS_DIR.rglob("*.jsonl"), key=lambda path: path.stat().st_size)
    teachers = [
        engine.teacher.model_copy(update={"params": SHORT}).model_dump() for engine in engines
    ]
    settings = Settings.load(
        data_dir=tmp_path / "data",
        changes={
            "ingest": {"sources": [str(session)], "window": "token_budget:300"},
            "replay": {"teachers": teachers, "max_total_usd": 1.0},
        },
        env={},
    )
    work = Pipeline(settings)
    [batch] = work.ingest_new()
    report = work.replay(batch).report
    assert report["n_states"] > 0
    assert report["n_sent"] == 2 * report["n_states"]
    assert report["stop_reason"] == "completed"
    assert report["n_answers"] + report["n_failed"] == report["n_sent"]
    # The tools are most of these prompts, and one of the two templates drops them: all its answers
    # are rows that say so, and none is a vote.
    rows = work.root.read("teacher_actions", batch).to_pylist()
    codes = {
        engine.name: {row["error_code"] for row in rows if row["teacher"] == engine.name}
        for engine in engines
    }
    assert codes["transformers"] == {"prompt_truncated"}
    assert codes["llama.cpp"] <= {None, "cut_off", "malformed_arguments", "empty_answer"}
    pairs = work.pairs(batch).report
    assert sum(pairs["outcomes"].values()) == report["n_states"]
    assert work.normalize(batch).report is not None
