"""Every way in which a call can fail, over real HTTP, and what the row then says."""

import asyncio
import sqlite3

import pytest

from replay_pipeline.replay import ledger_status, replay_states
from replay_pipeline.replay.dialects.replies import _BY_TYPE
from replay_pipeline.types import RetryPolicy
from tests.support.teachers import TeacherServer

MODEL = "deepseek/deepseek-v4-pro"
TWICE = RetryPolicy(max_attempts=2, first_wait_s=0.001, max_wait_s=0.01, settle_s=5.0)


def status(number, error_type=None, **more):
    return {"kind": "status", "status": number, "error_type": error_type, **more}


# name: (fault, code of the row, words of its message, attempts, charged calls)
SHAPES = {
    # OpenRouter's own vocabulary, with the status it comes with
    "type context_length_exceeded": (status(400, "context_length_exceeded"), "context_length_exceeded", "choose a window", 1, 0),
    "type max_tokens_exceeded": (status(400, "max_tokens_exceeded"), "max_tokens_exceeded", "lower max_completion_tokens", 1, 0),
    "type token_limit_exceeded": (status(400, "token_limit_exceeded"), "context_length_exceeded", "longer than", 1, 0),
    "type string_too_long": (status(400, "string_too_long"), "request_too_large", "too large", 1, 0),
    "type authentication": (status(401, "authentication"), "key_rejected", "check the teacher's key", 1, 0),
    "type permission_denied": (status(403, "permission_denied"), "forbidden", "check its permissions", 1, 0),
    "type payment_required": (status(402, "payment_required"), "credit_exhausted", "add credits", 1, 0),
    "type rate_limit_exceeded": (status(429, "rate_limit_exceeded", retry_after_s=0.01), "rate_limited", "too many requests", 2, 0),
    "type provider_overloaded": (status(529, "provider_overloaded"), "overloaded", "overloaded", 2, 0),
    "type provider_unavailable": (status(502, "provider_unavailable"), "unavailable", "not available", 2, 0),
    "type invalid_request": (status(400, "invalid_request"), "invalid_request", "does not accept", 1, 0),
    "type invalid_prompt": (status(400, "invalid_prompt"), "invalid_request", "does not accept", 1, 0),
    "type not_found": (status(404, "not_found"), "not_found", "no endpoint serves", 1, 0),
    "type precondition_failed": (status(412, "precondition_failed"), "invalid_request", "412", 1, 0),
    "type payload_too_large": (status(413, "payload_too_large"), "request_too_large", "choose a window", 1, 0),
    "type unprocessable": (status(422, "unprocessable"), "invalid_request", "422", 1, 0),
    "type content_policy_violation": (status(403, "content_policy_violation"), "moderated", "moderation", 1, 0),
    "type refusal": (status(400, "refusal"), "refused", "refused", 1, 0),
    "type invalid_image": (status(400, "invalid_image"), "invalid_image", "image", 1, 0),
    "type image_too_large": (status(400, "image_too_large"), "invalid_image", "image", 1, 0),
    "type image_too_small": (status(400, "image_too_small"), "invalid_image", "image", 1, 0),
    "type unsupported_image_format": (status(400, "unsupported_image_format"), "invalid_image", "image", 1, 0),
    "type image_not_found": (status(404, "image_not_found"), "invalid_image", "image", 1, 0),
    "type image_download_failed": (status(400, "image_download_failed"), "invalid_image", "image", 1, 0),
    "type server": (status(500, "server"), "server_error", "the provider failed", 2, 0),
    "type timeout": (status(504, "timeout"), "timeout", "took too long", 2, 0),
    "type unmapped": (status(500, "unmapped"), "server_error", "the provider failed", 2, 0),
    # bare statuses
    "status 400": (status(400), "invalid_request", "a fault was asked for", 1, 0),
    "status 400 about the context": (status(400, message="This model's maximum context length is 8192 tokens"), "context_length_exceeded", "8192", 1, 0),
    "status 401": (status(401), "key_rejected", "401", 1, 0),
    "status 402": (status(402), "credit_exhausted", "add credits", 1, 0),
    "status 402 in flight": (status(402, metadata={"reason": "in_flight_budget_exhausted"}, retry_after_s=0.01), "in_flight_budget", "in flight", 2, 0),
    "status 402 too dear": (status(402, metadata={"reason": "weight_exceeds_budget"}), "exceeds_account_budget", "dearer", 1, 0),
    "status 403": (status(403), "forbidden", "403", 1, 0),
    "status 403 flagged": (status(403, metadata={"reasons": ["violence"], "flagged_input": "x"}), "moderated", "moderation", 1, 0),
    "status 404": (status(404), "not_found", "404", 1, 0),
    "status 408": (status(408), "timeout", "408", 2, 0),
    "status 413": (status(413), "request_too_large", "413", 1, 0),
    "status 422": (status(422), "invalid_request", "422", 1, 0),
    "status 429": (status(429), "rate_limited", "429", 2, 0),
    "status 429 not retryable": (status(429, metadata={"availability": {"retryable": False}}), "rate_limited", "429", 1, 0),
    "status 500": (status(500), "server_error", "500", 2, 0),
    "status 502 of a provider": (status(502, metadata={"provider_name": "Novita", "raw": {"error": {"message": "CUDA out of memory"}}}), "unavailable", "Novita, 502: a fault was asked for: CUDA out of memory", 2, 0),
    "status 503": (status(503), "overloaded", "503", 2, 0),
    "status 504": (status(504), "timeout", "504", 2, 0),
    "status 524": (status(524), "timeout", "524", 2, 0),
    "status 529": (status(529), "overloaded", "529", 2, 0),
    "status 418": (status(418), "invalid_request", "418", 1, 0),
    "status 599": (status(599), "server_error", "599", 2, 0),
    # other shapes
    "HTML instead of JSON": ({"kind": "not_json", "status": 502}, "unavailable", "Bad gateway", 2, 0),
    "HTML with status 200": ({"kind": "not_json", "status": 200}, "outcome_unknown", "asked again", 3, 0),
    "error in a 200": ({"kind": "error_200", "status": 503, "message": "no capacity"}, "overloaded", "no capacity", 2, 0),
    "error in a 200 with a type": ({"kind": "error_200", "status": 400, "error_type": "context_length_exceeded"}, "context_length_exceeded", "window", 1, 0),
    "error inside a choice": ({"kind": "choice_error", "status": 502, "message": "upstream died"}, "unavailable", "upstream died", 2, 0),
    "error in a stream": ({"kind": "stream_error", "status": 502, "message": "mid-stream"}, "unavailable", "mid-stream", 2, 0),
    "no choices": ({"kind": "empty_choices"}, "empty_reply", "no choices", 2, 0),
    "empty and free": ({"kind": "empty_answer"}, "empty_answer", "neither text nor a tool call", 2, 0),
    "empty and paid": ({"kind": "empty_paid"}, "empty_answer", "neither text nor a tool call", 1, 1),
    "cut off": ({"kind": "length"}, "cut_off", "raise max_completion_tokens", 1, 1),
    "filtered": ({"kind": "content_filter"}, "content_filtered", "filtered", 1, 1),
    "refusal in the message": ({"kind": "refusal"}, "refused", "can't help", 1, 1),
    "malformed arguments": ({"kind": "malformed_arguments"}, "malformed_arguments", "Bash are not JSON", 1, 1),
    "hang-up before work": ({"kind": "drop_before"}, "outcome_unknown", "full reservation", 3, 0),
    "hang-up after work": ({"kind": "drop_after"}, "outcome_unknown", "full reservation", 3, 3),
    "reply cut short": ({"kind": "truncate"}, "outcome_unknown", "full reservation", 3, 3),
    "stream cut short": ({"kind": "truncate_stream"}, "outcome_unknown", "full reservation", 3, 3),
    "never answers": ({"kind": "stall"}, "outcome_unknown", "full reservation", 1, 1),
    # harmless ones
    "a whole stream, unasked": ({"kind": "stream"}, None, None, 1, 1),
    "no cost in the usage": ({"kind": "hidden_cost"}, None, None, 1, 1),
    "no usage at all": ({"kind": "no_usage"}, None, None, 1, 1),
    "dearer than its bound": ({"kind": "overcharge", "factor": 500}, None, None, 1, 1),
}  # fmt: skip
NAMES = list(SHAPES)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """One teacher per shape, since some shapes stop their teacher."""
    ledger = tmp_path_factory.mktemp("shapes") / "ledger.sqlite"
    faults = [{**SHAPES[name][0], "state_id": name} for name in NAMES]
    with TeacherServer(script={"content": "fine"}, faults=faults) as server:
        [teacher] = server.teachers([MODEL])
        reports = {}

        async def replay(name):
            state = {
                "state_id": name,
                "messages": [{"role": "user", "content": name}],
                "student_action": {"role": "assistant", "content": "ls"},
            }
            one = teacher.model_copy(update={"name": name, "timeout_s": 5.0})
            reports[name] = await replay_states(
                [state], [one], max_total_usd=1.0, ledger=ledger, retry=TWICE, is_durable=False
            )

        async def replay_all():
            async with asyncio.TaskGroup() as group:
                for name in NAMES:
                    group.create_task(replay(name))

        asyncio.run(replay_all())
    return reports, ledger, server.bill()


@pytest.mark.parametrize("name", NAMES)
def test_each_failure_is_a_row_with_a_code_and_a_message_a_user_understands(replayed, name):
    reports, _, _ = replayed
    _, code, words, n_attempts, _ = SHAPES[name]
    [row] = reports[name].actions
    assert (row.error_code, row.n_attempts) == (code, n_attempts)
    assert (row.action is None) == (code not in (None, "cut_off", "malformed_arguments"))
    if code is None:
        assert row.error_message is None
    else:
        assert words in row.error_message


def test_what_the_ledger_booked_is_what_the_server_charged(replayed):
    reports, ledger, bill = replayed
    n_charged = sum(n for *_, n in SHAPES.values())
    assert bill.n_charged == n_charged
    exact = {n for n, s in SHAPES.items() if s[1] != "outcome_unknown" and n != "no usage at all"}
    with sqlite3.connect(ledger) as database:
        booked = dict(database.execute("select state_id, sum(cost) from calls group by state_id"))
        reserved = dict(database.execute("select state_id, max(reserved) from calls group by 1"))
    database.close()
    for name in exact:
        row_nano = round(reports[name].actions[0].cost_usd * 1e9)
        assert booked[name] == row_nano
        assert (row_nano > 0) == (SHAPES[name][4] > 0)
    # Without a usage the whole reservation is booked.
    assert booked["no usage at all"] == reserved["no usage at all"]


def test_unknown_outcomes_keep_their_full_reservation(replayed):
    reports, ledger, _ = replayed
    lost = [name for name, shape in SHAPES.items() if shape[1] == "outcome_unknown"]
    status = ledger_status(ledger)
    assert status.calls["unknown"] == 3 * len(lost) - 2
    assert status.held_usd == 0
    total = sum(reports[name].unknown_usd for name in lost)
    assert status.unknown_usd == pytest.approx(total, abs=1e-9)


def test_a_cost_above_its_bound_is_booked_and_flagged(replayed):
    reports, _, _ = replayed
    report = reports["dearer than its bound"]
    assert report.spent_usd == report.newly_spent_usd > 0


def test_every_word_of_the_error_vocabulary_is_in_the_table():
    assert {f"type {word}" for word in [*_BY_TYPE, "unmapped"]} <= set(NAMES)
    assert len(_BY_TYPE) + 1 == 27


def test_lasting_failures_are_not_asked_again_and_passing_ones_are(replayed):
    _, ledger, _ = replayed
    with TeacherServer(script={"content": "fine"}) as server:
        [teacher] = server.teachers([MODEL])
        for name in ("status 413", "status 503"):
            state = {
                "state_id": name,
                "messages": [{"role": "user", "content": name}],
                "student_action": {"role": "assistant", "content": "ls"},
            }
            one = teacher.model_copy(update={"name": name, "timeout_s": 5.0})
            report = asyncio.run(
                replay_states([state], [one], max_total_usd=1.0, ledger=ledger, is_durable=False)
            )
            assert report.n_sent == (1 if name == "status 503" else 0)
            assert report.actions[0].error_code == (
                None if name == "status 503" else "request_too_large"
            )
