"""Replies that are well formed and lie, and endpoints that are not what they seem."""

import asyncio
import email.utils
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import SecretStr

from replay_pipeline.replay import ledger_status, replay_states
from replay_pipeline.replay.ask.attempts import Dispatcher, is_model
from replay_pipeline.replay.dialects.client import _without
from replay_pipeline.replay.dialects.prices import Price
from replay_pipeline.replay.dialects.replies import Answer
from replay_pipeline.replay.dialects.sizes import Size
from replay_pipeline.replay.dialects.usage import Usage
from replay_pipeline.replay.money.bills import BookedCost, judged, least_tokens, token_problem
from replay_pipeline.replay.money.calls import NewCall
from replay_pipeline.types import RetryPolicy, TeacherSpec
from tests.replay_pipeline.replay.conftest import QUICK, make_states
from tests.replay_pipeline.replay.test_odd_replies import USAGE, completion, raw
from tests.replay_pipeline.replay.test_recovery import leave_open
from tests.support.odd_server import OddServer

LONG = {"words": 20_000}
"""Prompts of 100 kB."""
PAGE = b"<!doctype html><html><title>Sign in to the hotel</title><p>Room and name, please</html>"


def ask(teacher, n, ledger, *, usd=1.0, states=None, **options):
    states = states or make_states(n, n_sessions=n, **options.pop("made", {}))
    return asyncio.run(
        replay_states(
            states, [teacher], max_total_usd=usd, ledger=ledger,
            **{"retry": QUICK, "is_durable": False, **options},
        )
    )  # fmt: skip


def reserved_usd(ledger):
    """What is held for one prompt of 100 kB, as a call that never ends shows."""
    with OddServer(lambda *_: "stall") as server:
        return ask(server.teacher(timeout_s=0.2), 1, ledger, usd=5.0, made=LONG).unknown_usd


# --- costs


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 0, "completion_tokens": 0},
        {"prompt_tokens": 0, "completion_tokens": 0, "cost": 0},
        {"prompt_tokens": 30_000, "completion_tokens": 5, "cost": 0},
        {"prompt_tokens": 12, "completion_tokens": 5},
    ],
)
def test_a_bill_that_says_nothing_was_used_is_not_believed(tmp_path, usage):
    bound = reserved_usd(tmp_path / "bound")
    with OddServer(lambda *_: (200, {}, raw(completion(usage=usage)))) as server:
        report = ask(server.teacher(), 12, tmp_path / "l", usd=5.5 * bound, made=LONG)
        n_charged = len(server.bodies)
    status = ledger_status(tmp_path / "l")
    assert (n_charged, report.stop_reason, report.n_disputed) == (5, "budget", 5)
    assert status.spent_usd == pytest.approx(5 * bound)
    assert (status.n_disputed, status.disputed_usd) == (5, pytest.approx(5 * bound))
    assert [row.error_code for row in report.actions] == [None] * 5, "the answers are kept"


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 1e9, "completion_tokens": 5},
        {"prompt_tokens": 30_000, "completion_tokens": 1e9},
        {"prompt_tokens": 30_000, "completion_tokens": 5, "cost": 1000.0},
        {"prompt_tokens": 30_000, "completion_tokens": 5,
         "prompt_tokens_details": {"cached_tokens": 1e9}},
    ],
)  # fmt: skip
def test_a_bill_that_no_call_can_have_blocks_nothing(tmp_path, usage):
    bound = reserved_usd(tmp_path / "bound")
    replies = [completion(usage=usage)] + [completion(usage=dict(USAGE, cost=bound / 9))] * 20
    with OddServer(lambda n, _: (200, {}, raw(replies[n]))) as server:
        report = ask(server.teacher(), 12, tmp_path / "l", usd=20 * bound, made=LONG)
    assert (len(report.actions), report.stop_reason, report.n_disputed) == (12, "completed", 1)
    assert max(row.cost_usd for row in report.actions) == pytest.approx(bound)
    assert not [row.n_prompt_tokens for row in report.actions if (row.cost_usd or 0) > 8 * bound]


def test_a_cost_that_was_cut_is_no_cost(tmp_path):
    whole = raw(completion(usage={"prompt_tokens": 10, "completion_tokens": 5, "cost": 1.5e-05}))
    cut = whole[: whole.index(b"1.5e-05") + 1]
    assert cut.endswith(b'"cost": 1')
    with OddServer(lambda *_: (200, {}, cut)) as server:
        report = ask(server.teacher(), 1, tmp_path / "l", usd=5.0)
        n_sent = len(server.bodies)
    assert report.spent_usd == ledger_status(tmp_path / "l").spent_usd == 0
    assert report.unknown_usd < 0.05 * n_sent, "the money of a call, not a dollar"


@pytest.mark.parametrize(
    ("usage", "action", "booked"),
    [
        ({"n_prompt_tokens": 100, "n_completion_tokens": 10, "fee_nano": 500}, {}, (120_500, None)),
        ({}, {}, (5_000_000, "no cost and no usage came with it")),
        ({"cost_nano": 0}, None, (0, None)),
        (
            {"cost_nano": 150_000, "n_prompt_tokens": 100, "n_completion_tokens": 1000},
            {"content": "x"},
            (5_000_000, "a cost of $0.000150 where $0.002100 is the least its tokens cost"),
        ),
    ],
)
def test_a_call_is_booked_at_its_tokens_and_fee_or_at_its_bound(usage, action, booked):
    found = judged(
        Answer(action=action, usage=Usage(**usage)), Size(n_bytes=400, n_messages=1),
        price=Price.of({"prompt": 1e-6, "completion": 2e-6}),
        bound_nano=5_000_000, n_limit=1000, n_reply_bytes=50,
    )  # fmt: skip
    assert found == BookedCost(cost_nano=booked[0], disputed=booked[1])


def test_usage_and_size_bound_each_other_from_both_sides():
    size = Size(n_bytes=100_000, n_messages=3)
    told = [
        token_problem(Usage(n_prompt_tokens=n, n_completion_tokens=m), size, 100, 2000)
        for n, m in [(0, 5), (30_000, 5), (30_000, 0), (2 * 101_072, 5), (300_000, 5), (9e4, 2201)]
    ]
    assert [problem is None for problem in told] == [False, True, False, True, False, False]
    assert least_tokens(Size(n_bytes=40, n_messages=1)) == 1


# --- pauses


@pytest.mark.parametrize(
    "pause",
    ["0", email.utils.format_datetime(datetime.now(UTC) - timedelta(hours=1), usegmt=True)],
    ids=["zero", "an hour ago"],  # workers collect at different seconds, and must name tests alike
)
def test_a_pause_of_nothing_is_no_leave_to_ask_again_at_once(tmp_path, monkeypatch, pause):
    waited = []

    async def wait(_, seconds):
        waited.append(seconds)

    monkeypatch.setattr(Dispatcher, "wait", wait)
    with OddServer(lambda *_: (429, {"retry-after": pause}, b"{}")) as server:
        report = ask(server.teacher(), 1, tmp_path / "l", retry=RetryPolicy(settle_s=0))
    assert [row.error_code for row in report.actions] == ["rate_limited"]
    waits = [seconds for seconds in waited if seconds > 0]
    assert len(waits) == 5
    assert all(seconds >= 0.25 * 2**place for place, seconds in enumerate(waits))


# --- endpoints


@pytest.mark.parametrize("dialect", ["vllm", "openrouter"])
@pytest.mark.parametrize(
    "page",
    [(200, {"content-type": "text/html"}, PAGE), (200, {}, b'{"status": "ok", "page": "' + PAGE[:50] + b'"}')],
    ids=["a page", "other JSON"],
)  # fmt: skip
def test_a_page_gets_three_calls_and_no_more(tmp_path, page, dialect):
    with OddServer(lambda *_: page) as server:
        teacher = server.teacher(dialect=dialect, max_concurrency=16)
        report = ask(teacher, 30, tmp_path / "l", max_concurrency=16)
        n_sent = len(server.bodies)
    status = ledger_status(tmp_path / "l")
    assert n_sent == 3
    assert (status.calls, status.held_usd, status.spent_usd) == ({"unknown": 3}, 0, 0)
    assert report.stop_reason == "teacher_stopped"
    assert report.skipped == {"teacher_stopped": 27}
    assert "not a chat completion" in report.stopped_teachers["t"]
    assert PAGE[:25].decode() in report.stopped_teachers["t"]
    assert len(report.stopped_teachers["t"]) < 400


@pytest.mark.parametrize("status", [302, 404])
def test_an_address_that_leads_elsewhere_costs_nothing_and_ends_its_teacher(tmp_path, status):
    away = (status, {"location": "/login", "content-type": "text/html"}, PAGE)
    with OddServer(lambda *_: away) as server:
        report = ask(server.teacher(), 30, tmp_path / "l")
        assert len(server.bodies) == 3
    assert ledger_status(tmp_path / "l").unknown_usd == 0
    assert {row.error_code for row in report.actions} == {"no_completion"}
    assert report.stop_reason == "teacher_stopped"


def test_an_endpoint_that_turns_into_a_page_ends_after_three_in_a_row(tmp_path):
    def reply(number, _):
        is_page = number in (4, 6, 7) or number >= 12
        return (
            (200, {"content-type": "text/html"}, PAGE) if is_page else (200, {}, raw(completion()))
        )

    with OddServer(reply) as server:
        report = ask(server.teacher(max_concurrency=1), 30, tmp_path / "l")
        assert len(server.bodies) == 15
    assert report.stop_reason == "teacher_stopped"
    assert ledger_status(tmp_path / "l").calls == {"answered": 9, "unknown": 6}


def of_model(name):
    return lambda *_: (200, {}, raw(completion(model=name)))


def test_three_answers_of_another_model_end_its_teacher(tmp_path):
    with OddServer(of_model("vendor/tiny-random-1b")) as server:
        teacher = server.teacher(model="deepseek/deepseek-v4-pro", max_concurrency=16)
        report = ask(teacher, 30, tmp_path / "l", max_concurrency=16)
        assert len(server.bodies) == 3
    assert report.stop_reason == "teacher_stopped"
    assert report.skipped == {"teacher_stopped": 27}
    told = report.stopped_teachers["t"]
    assert "deepseek/deepseek-v4-pro was asked" in told
    assert "vendor/tiny-random-1b" in told
    # They are paid for, and no vote.
    assert {row.error_code for row in report.actions} == {"other_model"}
    assert ledger_status(tmp_path / "l").calls == {"answered": 3}
    assert ledger_status(tmp_path / "l").spent_usd == report.newly_spent_usd > 0


def test_answers_of_another_name_count_once_the_teacher_says_that_it_is_its_own(tmp_path):
    with OddServer(of_model("vendor/tiny-random-1b")) as server:
        teacher = server.teacher(model="deployment-7", max_concurrency=1)
        assert ask(teacher, 9, tmp_path / "l").skipped == {"teacher_stopped": 6}
        teacher = teacher.model_copy(update={"answers_as": "tiny-random"})
        report = ask(teacher, 9, tmp_path / "l")
        assert len(server.bodies) == 9
    assert [row.error_code for row in report.actions] == [None] * 9
    assert report.n_cached == 3


def test_what_answers_as_another_once_it_is_known_is_let_be(tmp_path):
    """A router may fall back for a moment; the rows say which model it was."""

    def reply(number, _):
        return (200, {}, raw(completion(model="a/b" if number < 1 else "vendor/other")))

    with OddServer(reply) as server:
        report = ask(server.teacher(max_concurrency=1), 9, tmp_path / "l")
    assert report.stop_reason == "completed"
    assert [row.model for row in report.actions] == ["a/b"] + ["vendor/other"] * 8


@pytest.mark.parametrize(
    ("asked", "answered", "also"),
    [
        ("deepseek/deepseek-v4-pro", "deepseek/deepseek-v4-pro-20260412", None),
        ("anthropic/claude-sonnet-4.5", "anthropic/claude-4.5-sonnet-20250929", None),
        ("claude-3-5-sonnet-latest", "claude-3-5-sonnet-20241022", None),
        ("qwen3-coder:30b", "qwen3-coder:30b", None),
        ("qwen/qwen3-coder:free", "qwen/qwen3-coder-480b-a35b-07-25", None),
        ("qwen", "/models/Qwen2.5-Coder-7B.gguf", None),
        ("vendor/old-name", "vendor/new-name", "vendor/new-name"),
        ("openrouter/auto", "vendor/any", None),
        ("@preset/mine", "vendor/any", None),
        ("vendor/model", None, None),
    ],
)
def test_a_model_is_known_by_the_names_that_endpoints_give_it(asked, answered, also):
    assert is_model(TeacherSpec(name="t", model=asked), answered, also=also)


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ("deepseek/deepseek-v4-pro", "deepseek/deepseek-v4-flash"),
        ("vendor/big-70b", "vendor/big-7b"),
        ("anthropic/claude-sonnet-4.5", "anthropic/claude-haiku-4.5"),
        ("gpt-4o", "gpt-3.5-turbo"),
    ],
)
def test_a_smaller_or_older_one_is_another_model(asked, answered):
    assert not is_model(TeacherSpec(name="t", model=asked), answered)


def test_at_most_three_slow_pages_are_held_where_an_endpoint_has_answered_before(tmp_path):
    async def page():
        await asyncio.sleep(0.5)
        return (200, {"content-type": "text/html"}, PAGE)

    is_page = []
    with OddServer(lambda *_: page() if is_page else (200, {}, raw(completion()))) as server:
        teacher = server.teacher(max_concurrency=16)
        ask(teacher, 1, tmp_path / "l", max_concurrency=16)
        is_page.append(True)
        report = ask(teacher, 30, tmp_path / "l", states=make_states(30, n_sessions=30, words=9))
        assert len(server.bodies) == 1 + 3
    assert report.skipped == {"teacher_stopped": 27}
    assert ledger_status(tmp_path / "l").calls == {"answered": 1, "unknown": 3}


def test_a_key_refused_in_mid_run_is_no_completed_run(tmp_path):
    def reply(number, _):
        return (200, {}, raw(completion())) if number < 12 else (401, {}, b"{}")

    with OddServer(reply) as server:
        report = ask(server.teacher(max_concurrency=1), 60, tmp_path / "l")
    assert (report.stop_reason, report.skipped) == ("teacher_stopped", {"teacher_stopped": 47})
    assert "rejected" in report.stopped_teachers["t"]


@pytest.mark.parametrize("dialect", ["vllm", "openrouter"])
def test_a_byte_order_mark_is_no_part_of_a_reply(tmp_path, dialect):
    with OddServer(lambda *_: (200, {}, b"\xef\xbb\xbf" + raw(completion()))) as server:
        [row] = ask(server.teacher(dialect=dialect), 1, tmp_path / "l").actions
    assert (row.error_code, row.action["content"]) == (None, "fine")


# --- keys


@pytest.mark.parametrize(
    "key", ["ollama", "EMPTY", "none", "1", "no-key-required", "sk-no-key-required"]
)
def test_a_key_that_is_a_word_is_not_cut_out_of_answers(tmp_path, monkeypatch, key):
    monkeypatch.setenv("OWN_KEY", key)
    said = f"I would run {key} first; {key}."
    with OddServer(lambda *_: (200, {}, raw(completion({"content": said})))) as server:
        [row] = ask(server.teacher(api_key_env="OWN_KEY"), 1, tmp_path / "l").actions
    assert (row.error_code, row.action["content"], row.cost_usd) == (None, said, 0.0002)


def test_a_key_is_cut_out_where_it_stands_alone():
    key = SecretStr("sk-or-v1-0a1b2c3d4e5f6071")
    told = b'{"error": "Incorrect API key: sk-or-v1-0a1b2c3d4e5f6071."}'
    assert _without(key, told) == b'{"error": "Incorrect API key: <API KEY>."}'
    part = b"the hash xsk-or-v1-0a1b2c3d4e5f60718 is another"
    assert _without(key, part) == part
    assert _without(None, told) == told


def test_the_words_beside_a_status_are_logged_nowhere(tmp_path, caplog):
    """An endpoint may repeat the key there."""
    caplog.set_level("DEBUG")
    with OddServer(lambda *_: (200, {}, raw(completion()))) as server:
        ask(server.teacher(), 1, tmp_path / "l")
    assert [record.name for record in caplog.records if record.name.startswith("http")] == []


# --- answers from a router's cache


def lost_call(sha, nano=10_000_000):
    return NewCall(
        request_sha=sha, state_id="s0", teacher="t", model="a/b", run_id="died",
        scopes=("day:x",), reserved_nano=nano, timeout_s=0,
    )  # fmt: skip


@pytest.mark.parametrize("has_record", [True, False])
def test_a_hit_that_names_no_source_costs_what_its_answer_had_cost(tmp_path, has_record):
    free = {"prompt_tokens": 0, "completion_tokens": 0, "cost": 0}
    hit = (200, {"x-openrouter-cache-status": "HIT"}, raw(completion(usage=free)))
    record = raw({"data": {"total_cost": 0.0003}})
    with OddServer(lambda *_: hit, lambda _: (200 if has_record else 404, {}, record)) as server:
        teacher = server.teacher(dialect="openrouter")
        [row] = ask(teacher, 1, tmp_path / "first").actions
        assert row.cost_usd == 0, "nothing of ours had paid for it"
        leave_open(tmp_path / "l", lost_call(row.request_sha))
        report = ask(teacher, 1, tmp_path / "l")
    status = ledger_status(tmp_path / "l")
    assert (status.unknown_usd, status.held_usd) == (0, 0)
    if has_record:
        assert (status.spent_usd, report.n_disputed) == (0.0003, 0)
    else:
        assert 0.0003 < status.spent_usd < 0.002, "by the size of the answer, not by its limit"
        assert report.n_disputed == status.n_disputed == 1


def test_cookies_of_an_endpoint_are_not_sent_back(tmp_path):
    heads = []

    def reply(*_):
        return 200, {"set-cookie": "session=abc; Path=/"}, raw(completion())

    class Listening(OddServer):
        async def _talk(self, reader, writer):
            readuntil = reader.readuntil

            async def heard(separator):
                heads.append(await readuntil(separator))
                return heads[-1]

            reader.readuntil = heard
            await super()._talk(reader, writer)

    with Listening(reply) as server:
        teacher = server.teacher(base_url=f"http://localhost:{server.port}/v1", max_concurrency=1)
        ask(teacher, 3, tmp_path / "l")
    assert len([head for head in heads if head]) >= 3
    assert not any(b"cookie" in head.lower() for head in heads)
