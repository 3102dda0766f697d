"""One reply, one fate: whatever an endpoint sends, its row is kept and no other call is touched."""

import asyncio
import email.utils
import json
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from replay_pipeline.actions import canonical_action
from replay_pipeline.replay import ledger_status, replay_states, replay_trace_sync
from replay_pipeline.replay.dialects.replies import Answer, Failure, read_reply
from replay_pipeline.replay.money.calls import decode_row, encode_row
from replay_pipeline.types import TeacherAction
from tests.replay_pipeline.replay.conftest import QUICK, make_states
from tests.support.odd_server import OddServer

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "cost": 0.0002}


def completion(message=None, *, usage=USAGE, finish="stop", **more):
    choice = {"index": 0, "finish_reason": finish, "message": message or {"content": "fine"}}
    return {"id": "gen-1", "choices": [choice], "usage": usage, **more}


def raw(reply):
    return reply if isinstance(reply, bytes) else json.dumps(reply).encode()


def stream(*chunks):
    lines = [chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in chunks]
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()


def ask(server, n, ledger, *, usd=1.0, **options):
    teacher = server.teacher(**options.pop("teacher", {}))
    return asyncio.run(
        replay_states(
            make_states(n, n_sessions=n), [teacher], max_total_usd=usd, ledger=ledger, retry=QUICK,
            is_durable=False, **options,
        )
    )  # fmt: skip


DELTA = {"choices": [{"delta": {"content": "fine"}, "finish_reason": "stop"}], "usage": USAGE}
DEEP = b"[" * 5000 + b"]" * 5000

# name: (reply, code of the row, cost in nano-dollars); `None` for a cost at the full reservation
ODD = {
    "prompt tokens as text": (completion(usage={"prompt_tokens": "10", "completion_tokens": 5}), None, 20_000),
    "cached tokens as text": (completion(usage={**USAGE, "prompt_tokens_details": {"cached_tokens": "5"}}), None, 200_000),
    "tokens as floats": (completion(usage={**USAGE, "prompt_tokens": 10.0}), None, 200_000),
    "cost as text": (completion(usage={**USAGE, "cost": "0.0002"}), None, 200_000),
    "a number for an id": (completion(id=123), None, 200_000),
    "an object for a provider": (completion(provider={"name": "x"}, model=7), None, 200_000),
    "an endless cost": (completion(usage={**USAGE, "cost": 1e12}), None, 20_000),
    "choices as an object, paid": (completion(choices={}), "empty_reply", 200_000),
    "choices of nothing, paid": (completion(choices=[None]), "empty_answer", 200_000),
    "an error in a choice, paid": (
        completion(choices=[{"finish_reason": "error", "error": {"code": 502, "message": "died"}}], usage={**USAGE, "cost": 0.0084}),
        "unavailable", 8_400_000,
    ),
    "an error, paid": ({"error": {"message": "moderated late"}, "usage": USAGE}, "server_error", 200_000),
    "content in parts": (completion({"content": [{"type": "text", "text": "fi"}, {"text": "ne"}]}), None, 200_000),
    "arguments as an object": (completion({"tool_calls": [{"function": {"name": "Bash", "arguments": {"command": "ls"}}}]}), None, 200_000),
    "tool calls of numbers": (completion({"tool_calls": [1, {"function": 2}]}), "malformed_arguments", 200_000),
    "deep arguments": (completion({"tool_calls": [{"function": {"name": "Bash", "arguments": '{"a":' + "[" * 5000 + "]" * 5000 + "}"}}]}), "malformed_arguments", 200_000),
    "a lone surrogate": (raw(completion()).replace(b"fine", b"fi\\ud800ne"), None, 200_000),
    "not a number": (raw(completion(x=float("nan"))), None, 200_000),
    "a number without end": (raw(completion()).replace(b'"prompt_tokens": 10', b'"prompt_tokens": 1e999'), None, 200_000),
    "broken text": (raw(completion()).replace(b"fine", b"fi\xffne"), None, 200_000),
    "5,000 deep, paid": (raw(completion()).replace(b'"fine"', DEEP), "truncated_reply", 200_000),
    "a stream with nothing in it": (stream("null", "[]", DELTA), None, 200_000),
    "a stream with content in parts": (stream({"choices": [{"delta": {"content": ["fine"]}}]}, DELTA), None, 200_000),
    "a stream of odd tool calls": (stream({"choices": [{"delta": {"tool_calls": [{"index": "0", "function": {"name": "Bash", "arguments": 5}}]}}]}, DELTA), None, 200_000),
}  # fmt: skip


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """All odd replies among good ones, asked at once; then once more."""
    ledger = tmp_path_factory.mktemp("odd") / "ledger.sqlite"
    replies = [raw(reply) for reply, _, _ in ODD.values()]

    def reply(_, body):
        # The session's number is the first thing that the prompt says.
        number = int(json.loads(body)["messages"][0]["content"].split()[3].rstrip("."))
        data = replies[number] if number < len(replies) else raw(completion())
        headers = {"content-type": "text/event-stream"} if data.startswith(b"data:") else {}
        return 200, headers, data

    with OddServer(reply) as server:
        report = ask(server, len(ODD) + 20, ledger)
        sent = len(server.bodies)
        again = ask(server, len(ODD) + 20, ledger)
        assert len(server.bodies) == sent, "a second run asks nothing again"
    return report, again, ledger


@pytest.mark.parametrize("name", ODD)
def test_an_odd_reply_is_one_row_with_the_cost_that_can_be_known(odd, name):
    _, code, nano = ODD[name]
    row = odd[0].actions[list(ODD).index(name)]
    assert (row.error_code, round(row.cost_usd * 1e9)) == (code, nano)
    assert (row.action is None) == (code is not None) or code == "malformed_arguments"
    assert decode_row(encode_row(row)) == row


def test_every_other_answer_is_kept_and_every_later_run_works(odd):
    report, again, ledger = odd
    assert report.stop_reason == "completed"
    assert all(row.error_code is None for row in report.actions[len(ODD) :])
    assert again.actions == report.actions
    status = ledger_status(ledger)
    assert status.spent_usd == pytest.approx(report.spent_usd)
    assert status.unknown_usd == 0


def test_what_does_not_fit_its_type_is_not_written_to_the_ledger():
    with pytest.raises(msgspec.ValidationError):
        encode_row(TeacherAction(state_id="s", teacher="t", generation_id=123))


def test_an_error_in_a_200_that_says_nothing_of_itself_may_pass():
    for error in ({"message": "try later"}, {"code": "oops", "message": "x"}, "overloaded", ["x"]):
        failure = read_reply(200, {}, raw({"error": error}))
        assert isinstance(failure, Failure)
        assert (failure.is_lasting, failure.is_retryable) == (False, True)
    named = read_reply(200, {}, raw({"error": {"code": "429", "message": "slow down"}}))
    assert named.code == "rate_limited"


def test_an_account_without_money_stops_its_teacher_instead_of_waiting():
    body = raw({"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}})
    failure = read_reply(429, {}, body)
    assert (failure.code, failure.stops_teacher, failure.is_retryable) == (
        "credit_exhausted", True, False
    )  # fmt: skip


def test_a_pause_may_be_given_as_a_date():
    date = email.utils.format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    failure = read_reply(429, {"retry-after": date}, b"{}")
    assert 80 < failure.retry_after_s <= 90


def test_a_time_limit_shorter_than_the_model_does_not_pay_again_in_every_run(tmp_path):
    with OddServer(lambda *_: None) as server:  # it takes the request and hangs up: asked again
        ask(server, 1, tmp_path / "hung", teacher={"timeout_s": 0.05})
        n_hung = len(server.bodies)
    assert 1 <= n_hung <= 3

    with OddServer(lambda *_: "stall") as server:
        first, second, third, longer = (
            ask(server, 1, tmp_path / "slow", teacher={"timeout_s": timeout_s})
            for timeout_s in (0.1, 0.1, 0.1, 0.3)
        )
        n_slow = len(server.bodies)
    assert n_slow == 2, "once, and once more with a longer limit"
    assert [report.n_sent for report in (first, second, third, longer)] == [1, 0, 0, 1]
    assert "raise the teacher's timeout_s" in third.actions[0].error_message


def test_an_exception_in_one_task_is_a_row_and_ends_nothing(tmp_path, monkeypatch):
    from replay_pipeline.replay.ask import attempts

    def checked(task, answer, _):
        if task.state_id == "s3":
            raise RecursionError("too deep")
        return answer

    monkeypatch.setattr(attempts, "checked", checked)
    with OddServer(lambda *_: (200, {}, raw(completion()))) as server:
        report = ask(server, 10, tmp_path / "l")
        assert [row.error_code for row in report.actions].count(None) == 9
        [row] = [row for row in report.actions if row.error_code]
        assert (row.error_code, row.error_message) == ("unexpected", "RecursionError: too deep")
        assert row.finish_reason == "error"
        status = ledger_status(tmp_path / "l")
        assert (status.calls, row.cost_usd) == ({"answered": 10}, 0.0002)


def test_a_matcher_that_fails_costs_a_vote_and_no_run(tmp_path, monkeypatch):
    from replay_pipeline.replay.buy import policy

    def read(*_, **__):
        raise RecursionError("ls && " * 3)

    monkeypatch.setattr(policy, "read_answer", read)
    monkeypatch.setattr(
        policy,
        "canonical_action",
        lambda message, **_: canonical_action(message) if not message["content"] else 1 / 0,
    )
    assert not policy.parse_gates(()).poll(make_states(1)[0]).student.is_valid
    with OddServer(lambda *_: (200, {}, raw(completion()))) as server:
        # No pair can come where the recorded action can't be read, so this gate asks nobody there.
        spared = ask(server, 3, tmp_path / "l", gates=("cheap_first",), agreement_threshold=1)
        asked = ask(server, 3, tmp_path / "l", agreement_threshold=1)
    assert spared.actions == []
    assert [row.error_code for row in asked.actions] == [None] * 3


def test_answers_are_read_from_the_ledger_as_they_were_given(tmp_path):
    with OddServer(lambda *_: (200, {}, raw(completion(id=5, provider=["x"])))) as server:
        report = ask(server, 3, tmp_path / "l")
        states = make_states(3, n_sessions=3)
        assert (
            replay_trace_sync(states, [server.teacher()], 0, ledger=tmp_path / "l")
            == report.actions
        )
    assert isinstance(read_reply(200, {}, raw(completion(id=5))), Answer)
