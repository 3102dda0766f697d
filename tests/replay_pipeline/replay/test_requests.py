from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from replay_pipeline.errors import PriceError
from replay_pipeline.replay.dialects.base import RequestOptions
from replay_pipeline.replay.dialects.prices import Price, PriceBook, floor_nano, nano, usd
from replay_pipeline.replay.dialects.requests import RequestBuilder, with_recorded_names
from replay_pipeline.replay.dialects.servers import DIALECTS, dialect_of
from replay_pipeline.replay.dialects.sizes import Learned, Size
from replay_pipeline.types import TeacherSpec
from tests.support.provider_rules import complaint

LISTED = ("max_tokens", "seed", "stop", "temperature", "tool_choice", "tools", "top_p")
PRICE = Price.of(
    {"prompt": 1e-6, "completion": "0.000004", "input_cache_read": 1e-7},
    supported_parameters=LISTED,
)
CLAUDE = TeacherSpec(name="opus", model="anthropic/claude-opus-4.7", is_distillable=False)
LOCAL = TeacherSpec(name="local", model="m", base_url="http://127.0.0.1:8000/v1")
NO_ARGUMENTS = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": "Bash", "parameters": {"type": "object"}}}]


def state(**more):
    return {
        "state_id": "s1",
        "session_id": "session",
        "messages": [{"role": "user", "content": "hello"}],
        "student_action": {"role": "assistant", "content": "hi"},
        "tools": TOOLS,
        **more,
    }


def body(teacher, *, price=PRICE, **options):
    return msgspec.json.decode(
        RequestBuilder(RequestOptions(**options)).body(state(), teacher, price)
    )


def sha(teacher=CLAUDE, *, state=None, **options):
    question = RequestBuilder(RequestOptions(**options)).question(
        state or globals()["state"](), teacher
    )
    return question.sha


def test_a_request_to_openrouter_pins_price_terms_and_route():
    request = body(CLAUDE, accepted_terms=frozenset({"anthropic/claude-opus-4.7"}))
    assert request["tools"] == [
        {"type": "function", "function": {**TOOLS[0]["function"], "parameters": NO_ARGUMENTS}}
    ]
    assert request["provider"]["max_price"] == {"prompt": 1.0, "completion": 4.0}
    assert request["provider"]["require_parameters"] is True
    assert request["provider"]["data_collection"] == "deny"
    assert request["provider"]["enforce_distillable_text"] is False
    assert request["session_id"] == "session"
    assert request["metadata"] == {"state_id": "s1"}
    open_weights = CLAUDE.model_copy(update={"model": "z-ai/glm-4.6", "is_distillable": True})
    assert body(open_weights)["provider"]["enforce_distillable_text"] is True


def test_a_request_to_openrouter_has_no_field_that_the_price_list_lacks():
    teacher = CLAUDE.model_copy(update={"params": {"temperature": 0.2, "logit_bias": {"1": 1}}})
    request = body(teacher)
    own = {"model", "messages", "provider", "metadata", "session_id"}
    assert request.keys() - own == {"tools", "temperature", "max_tokens"}
    [note] = RequestBuilder(RequestOptions()).adaptations(teacher, PRICE)
    assert note == "logit_bias is left out: openrouter does not list it for this model"
    newer = Price.of({"prompt": 1, "completion": 1}, supported_parameters=["max_completion_tokens"])
    assert "max_completion_tokens" in body(CLAUDE, price=newer)
    assert "max_tokens" not in body(CLAUDE, price=newer)
    small = Price.of({"prompt": 1, "completion": 1}, max_completion_tokens=1000)
    assert body(CLAUDE, price=small)["max_tokens"] == 1000


def test_a_model_without_tools_is_not_asked_at_states_with_tools():
    price = Price.of({"prompt": 1, "completion": 1}, supported_parameters=["max_tokens"])
    builder = RequestBuilder(RequestOptions())
    for tools, is_without in ((TOOLS, True), ([], False)):
        builder.body(state(tools=tools), CLAUDE, price)
        assert builder.lacks_tools(price) is is_without


def marks(request):
    """Places of the messages whose last block is marked for the prompt cache."""
    return [
        place
        for place, message in enumerate(request["messages"])
        if isinstance(message["content"], list) and "cache_control" in message["content"][-1]
    ]


def test_the_cache_is_marked_behind_system_last_asked_prefix_and_end():
    words = [{"role": "system", "content": "s"}]
    words += [{"role": ("user", "assistant")[n % 2], "content": f"{n}"} for n in range(7)]
    builder = RequestBuilder(RequestOptions())

    def marked(teacher, price=PRICE, n_asked=4):
        request = builder.body(state(messages=words), teacher, price, n_asked=n_asked)
        return marks(msgspec.json.decode(request))

    assert marked(CLAUDE) == [0, 3, 7]
    assert marked(CLAUDE, n_asked=0) == [0, 7]
    qwen = CLAUDE.model_copy(update={"model": "qwen/qwen3-max"})
    uncached = Price.of({"prompt": 1, "completion": 1})
    assert marked(qwen) == [0, 3, 7]
    assert marked(qwen, uncached) == []
    assert marked(CLAUDE.model_copy(update={"model": "z-ai/glm-4.6"})) == []


@pytest.mark.parametrize("dialect", ["vllm", "ollama", "llama.cpp", "transformers", "litellm"])
def test_other_servers_get_a_plain_body(dialect):
    request = body(LOCAL.model_copy(update={"dialect": dialect}))
    known = {"model", "messages", "tools", "max_tokens"}
    assert request.keys() - {"parallel_tool_calls"} == known
    assert request["max_tokens"] == 4096
    assert request.get("parallel_tool_calls", True) is True


def test_openai_and_azure_get_the_newer_limit_and_a_key_for_their_cache():
    for dialect in ("openai", "azure"):
        request = body(LOCAL.model_copy(update={"dialect": dialect}))
        assert request["max_completion_tokens"] == 4096
        assert "max_tokens" not in request
        assert 16 <= len(request["prompt_cache_key"]) <= 64
    key = SecretStr("k")
    assert DIALECTS["azure"].authorization(key) == {"api-key": "k"}
    assert DIALECTS["openai"].authorization(key) == {"authorization": "Bearer k"}


HISTORY = [
    {"role": "system", "content": "You code."},
    {"role": "user", "content": "fix it"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": n, "type": "function", "function": {"name": "Bash", "arguments": '{"command":"ls"}'}}
            for n in ("a", "b")
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "x.py"},
    {"role": "tool", "tool_call_id": "b", "content": "y.py"},
]  # fmt: skip


def test_a_tool_with_a_name_that_no_provider_takes_goes_by_another_and_comes_back():
    long = "mcp__" + "server_of_a_very_long_name" * 3 + "__do"
    asked = state(tools=[{"type": "function", "function": {"name": long}}])
    builder = RequestBuilder(RequestOptions())
    raw = builder.body(asked, CLAUDE, PRICE)
    [tool] = msgspec.json.decode(raw)["tools"]
    sent = tool["function"]["name"]
    assert complaint(msgspec.json.decode(raw)) is None
    assert len(sent) <= 64
    call = {"id": "c", "type": "function", "function": {"name": sent, "arguments": "{}"}}
    answer = with_recorded_names(
        {"role": "assistant", "content": None, "tool_calls": [call]}, asked
    )
    assert answer["tool_calls"][0]["function"]["name"] == long


def test_a_dialect_is_known_by_its_address():
    at = {
        "https://openrouter.ai/api/v1": "openrouter",
        "https://eu.openrouter.ai/api/v1": "openrouter",
        "http://localhost:11434/v1": "ollama",
        "http://proxy:4000": "litellm",
        "https://api.openai.com/v1": "openai",
        "https://name.openai.azure.com/openai/v1": "azure",
        "http://127.0.0.1:8000/v1": "compatible",
        "https://openrouter.ai.example.com/v1": "compatible",
    }
    for base_url, dialect in at.items():
        assert dialect_of(LOCAL.model_copy(update={"base_url": base_url})).name == dialect


def test_the_hash_names_the_question_and_nothing_else():
    same = [
        sha(),
        sha(CLAUDE.model_copy(update={"base_url": "http://127.0.0.1:1", "timeout_s": 5.0})),
        sha(state=state(state_id="other", session_id="elsewhere")),
        sha(accepted_terms=frozenset({"x"})),
    ]
    assert len(set(same)) == 1
    different = [
        sha(),
        sha(CLAUDE.model_copy(update={"name": "opus-2"})),
        sha(CLAUDE.model_copy(update={"params": {"temperature": 0.2}})),
        sha(state=state(messages=[{"role": "user", "content": "hullo"}])),
        sha(state=state(tools=[])),
        sha(max_completion_tokens=100),
    ]
    assert len(set(different)) == len(different)


def test_a_prompt_that_goes_on_is_measured_as_a_whole_one():
    builder = RequestBuilder(RequestOptions())
    dense = HISTORY + [{"role": "user", "content": "A" * 100 + " é"}]
    for messages in (HISTORY[:2], HISTORY, dense, HISTORY[:2]):
        grown = builder.question(state(messages=messages), CLAUDE).size
        fresh = RequestBuilder(RequestOptions()).question(state(messages=messages), CLAUDE).size
        assert grown == fresh


def test_sizes_are_learned_from_what_a_teacher_counted():
    size = Size(len(b'"' + b"word " * 8_000 + b'"'), 10)
    assert size.bound_tokens > size.n_bytes
    learned = Learned()
    for _ in range(8):
        learned = learned.with_answer(size, 10_000, 40)
    assert learned.expected_tokens(size) == 10_000
    assert learned.answer_tokens(4_000, 4096) == 40
    cut_short = learned.with_answer(size, 2_000, 40)
    assert (cut_short.n, cut_short.n_answers) == (8, 9)


@given(
    n_prompt=st.integers(0, 10**6),
    n_completion=st.integers(0, 10**5),
    cached=st.floats(0, 1),
    prices=st.tuples(*[st.floats(0, 1e-4)] * 4),
)
def test_no_call_costs_more_than_its_bound(n_prompt, n_completion, cached, prices):
    names = ("prompt", "completion", "input_cache_read", "input_cache_write")
    price = Price.of(
        dict(zip(names, (*prices[:2], min(prices[0], prices[2]), prices[3]), strict=True))
    )
    n_cached = int(n_prompt * cached)
    cost = price.cost_nano(
        n_prompt, n_completion, n_cached_tokens=n_cached, n_written_tokens=n_prompt - n_cached
    )
    assert cost <= price.bound_nano(n_prompt, n_completion)


def test_dollars_are_rounded_up_where_they_are_owed_and_down_where_they_are_a_ceiling():
    assert [nano(each) for each in (0.1, "0.0000000011", Decimal("2e-9"))] == [100_000_000, 2, 2]
    assert [floor_nano(each) for each in (0.1, 0.0000000019, 2.5)] == [
        100_000_000,
        1,
        2_500_000_000,
    ]
    assert usd(1_500_000_000) == 1.5


def test_a_price_without_a_cache_has_its_tokens_at_the_price_of_the_others():
    assert Price.of({"prompt": "0.000001", "completion": 4e-6}) == Price(
        prompt=1_000_000, completion=4_000_000, cache_read=1_000_000, cache_write=1_000_000,
        reasoning=4_000_000, request=0, source="configured", date="", canonical_slug=None,
        max_completion_tokens=None, supported_parameters=(), has_cache=False,
    )  # fmt: skip


FULL = {
    "prompt": "0.000001", "completion": 4e-6, "input_cache_read": "1e-7",
    "input_cache_write": 1.25e-6, "internal_reasoning": 5e-6, "request": "0.01",
}  # fmt: skip


def test_a_price_with_all_its_parts_is_read_in_pico_dollars():
    assert Price.of(FULL, source="here") == Price(
        prompt=1_000_000, completion=4_000_000, cache_read=100_000, cache_write=1_250_000,
        reasoning=5_000_000, request=10_000_000_000, source="here", has_cache=True,
    )  # fmt: skip
    assert Price.of({"prompt": "1e-13", "completion": 0}).prompt == 1, (
        "it is never free by rounding"
    )


def test_a_router_is_told_the_dearest_price_of_a_million_tokens():
    assert Price.of(FULL).max_price() == {"prompt": 1.25, "completion": 5.0, "request": 0.01}
    cheap_cache = Price.of(FULL | {"input_cache_write": 5e-7, "internal_reasoning": 3e-6})
    assert cheap_cache.max_price() == {"prompt": 1.0, "completion": 4.0, "request": 0.01}
    assert PRICE.max_price() == {"prompt": 1.0, "completion": 4.0}


ODD_PRICE = Price(
    prompt=2_000, completion=5_000, cache_read=1_000, cache_write=3_000, reasoning=7_000,
    request=11_000,
)  # fmt: skip


def test_a_bound_takes_every_token_at_its_dearest():
    assert ODD_PRICE.bound_nano(10, 4) == 10 * 3 + 4 * 7 + 11
    cheap = replace(ODD_PRICE, cache_write=1_000, reasoning=1_000)
    assert cheap.bound_nano(10, 4) == 10 * 2 + 4 * 5 + 11


def test_a_cost_takes_each_token_at_its_own_price():
    assert ODD_PRICE.cost_nano(10, 4) == 10 * 2 + 4 * 5 + 11
    parts = {"n_cached_tokens": 3, "n_written_tokens": 2}
    assert ODD_PRICE.cost_nano(10, 4, **parts) == 5 * 2 + 3 * 1 + 2 * 3 + 4 * 5 + 11
    assert ODD_PRICE.cost_nano(1, 0, n_cached_tokens=3) == 3 * 1 + 11, (
        "no fresh token, not minus two"
    )


def test_a_part_of_a_nano_dollar_is_owed_whole():
    for pico, expected in ((1, 1), (1_000, 1), (1_001, 2)):
        price = Price(prompt=pico, completion=0, cache_read=0, cache_write=0, reasoning=0)
        assert (price.cost_nano(1, 0), price.bound_nano(1, 0)) == (expected, expected)


def test_overrides_count_at_their_dearest():
    price = Price.of(
        {
            "prompt": "0.000001",
            "completion": "0.000002",
            "overrides": [{"min_prompt_tokens": 200_000, "prompt": "0.000003"}],
        }
    )
    assert (price.prompt, price.completion, price.cache_read) == (3_000_000, 2_000_000, 3_000_000)
    cheaper_at_night = {"prompt": 3e-6, "completion": 2e-6, "overrides": [{"prompt": 1e-6}]}
    assert Price.of(cheaper_at_night).prompt == 3_000_000
    assert Price.of({**FULL, "overrides": "by the hour"}) == Price.of(FULL)


def test_price_lists_are_kept_refreshed_and_refused_when_stale(tmp_path):
    now = [datetime(2026, 11, 1, tzinfo=UTC)]
    listing = [{"id": "a/b", "pricing": {"prompt": "1e-6", "completion": "2e-6"}}]
    teacher = TeacherSpec(name="t", model="a/b", base_url="https://x/v1")
    PriceBook(folder=tmp_path, now=lambda: now[0]).remember("https://x/v1", listing)
    book = PriceBook(folder=tmp_path, now=lambda: now[0])
    assert book.fresh("https://x/v1")
    assert not book.fresh("https://y/v1")
    price = book.price(teacher)
    assert (price.prompt, price.source) == (10**6, "https://x/v1/models")
    assert price.date == "2026-11-01T00:00:00+00:00"
    now[0] += timedelta(days=1)
    assert book.fresh("https://x/v1"), "for a whole day"
    now[0] += timedelta(seconds=1)
    assert not book.fresh("https://x/v1")
    now[0] += timedelta(days=6, seconds=-1)
    assert book.price(teacher).prompt == 10**6, "for a whole week"
    now[0] += timedelta(seconds=1)
    with pytest.raises(PriceError) as told:
        book.price(teacher)
    assert str(told.value) == (
        "teacher t: the prices of https://x/v1 are from 2026-11-01 and could not be fetched again; "
        "retry, or set `price`"
    )
    assert book.price(teacher.model_copy(update={"price": {"prompt": 0.5}})).prompt == 5 * 10**11


def test_a_price_list_that_cannot_be_read_is_passed_over(tmp_path, caplog):
    path = tmp_path / "https-x-v1.json"
    path.write_text("{broken")
    book = PriceBook(folder=tmp_path)
    assert book.models("https://x/v1/") == []
    assert not book.fresh("https://x/v1/")
    assert caplog.messages[0].startswith(f"{path}: price list ignored (JSON is malformed")
    with pytest.raises(PriceError) as told:
        book.price(TeacherSpec(name="t", model="a/b", base_url="https://x/v1/"))
    assert str(told.value) == (
        "teacher t: no price for a/b at https://x/v1/; set "
        'price = {"prompt": ..., "completion": ...} in dollars per token (0 is a price)'
    )


def test_a_price_list_that_cannot_be_kept_is_used_all_the_same(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    book = PriceBook(folder=tmp_path / "file")
    book.remember("https://x/v1", [{"id": "a", "pricing": {"prompt": 0, "completion": 0}}])
    assert book.models("https://x/v1") == ["a"]
    [told] = caplog.messages
    assert told.startswith("could not save the price list: ")
    assert str(tmp_path / "file") in told


def test_all_that_a_price_list_says_of_a_model_is_known_to_the_next_process(tmp_path):
    now = datetime(2026, 11, 1, 12, 30, 5, 999, tzinfo=UTC)
    listing = [
        {
            "id": "b", "pricing": FULL, "canonical_slug": "b-2026", "context_length": 8192,
            "top_provider": {"max_completion_tokens": 512}, "supported_parameters": ["tools", "seed"],
        },
        {"id": "a", "pricing": {"prompt": "0", "completion": "0"}, "top_provider": None},
        {"id": 7, "pricing": None},
        {"name": "without an id"},
        "no model at all",
    ]  # fmt: skip
    PriceBook(folder=tmp_path, now=lambda: now).remember("https://x/v1", listing)
    assert [path.name for path in tmp_path.iterdir()] == ["https-x-v1.json"]
    book = PriceBook(folder=tmp_path, now=lambda: now)
    assert book.models("https://x/v1") == ["7", "a", "b"]
    known = {"source": "https://x/v1/models", "date": "2026-11-01T12:30:05+00:00"}
    teacher = TeacherSpec(name="t", model="b", base_url="https://x/v1")
    assert book.price(teacher) == Price.of(
        FULL, **known, canonical_slug="b-2026", max_completion_tokens=512,
        supported_parameters=("tools", "seed"),
    )  # fmt: skip
    free = book.price(teacher.model_copy(update={"model": "a"}))
    assert free == Price.of({}, **known)
    assert (free.prompt, free.completion, free.has_cache) == (0, 0, False)
    with pytest.raises(PriceError, match="no price for c at https://x/v1"):
        book.price(teacher.model_copy(update={"model": "c"}))


def test_every_address_has_a_price_list_of_its_own(tmp_path):
    book = PriceBook(folder=tmp_path)
    for base_url in ("https://x/v1", "https://X/V1/X/"):
        book.remember(base_url, [{"id": base_url, "pricing": {}}])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "https-X-V1-X.json", "https-x-v1.json",
    ]  # fmt: skip
    assert PriceBook(folder=tmp_path).models("https://x/v1") == ["https://x/v1"]


@pytest.mark.parametrize(
    "pricing",
    [
        {"prompt": "-1", "completion": "-1"}, {"prompt": "-1", "completion": "1"},
        {"prompt": "1", "completion": "-1"}, {"prompt": "1"}, {"completion": "1"}, None,
        {"prompt": "it depends", "completion": "1"},
    ],
    ids=repr,
)  # fmt: skip
def test_a_router_that_prices_by_whim_is_refused(pricing):
    book = PriceBook()
    book.remember("https://x/v1", [{"id": "auto", "pricing": pricing}])
    with pytest.raises(PriceError, match="no price for auto"):
        book.price(TeacherSpec(name="t", model="auto", base_url="https://x/v1"))


def test_a_byte_of_fixed_text_counts_for_fewer_tokens_than_one_of_messages():
    told = {"type": "function", "function": {"name": "Read", "description": "Reads. " * 1_000}}
    messages = [{"role": "system", "content": "Be brief. " * 500}, *HISTORY]
    size = RequestBuilder(RequestOptions()).question(
        state(messages=messages, tools=[told]), CLAUDE
    ).size  # fmt: skip
    assert (size.n_system_bytes, size.n_tool_bytes > 7_000) == (5_000, True)
    plain = Size(size.n_bytes, size.n_messages)
    assert 0.83 < Learned().expected_tokens(size) / Learned().expected_tokens(plain) < 0.86
    taught = Learned()
    for _ in range(8):
        taught = taught.with_answer(size, 4_000, 40)
    assert taught.expected_tokens(size) == 4_000
    assert taught.expected_tokens(plain) > 4_500
