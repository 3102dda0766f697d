from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_pipeline.errors import PriceError
from replay_pipeline.replay.prices import Price, PriceBook
from replay_pipeline.replay.requests import RequestBuilder, RequestOptions, dialect_of
from replay_pipeline.types import TeacherSpec

PRICE = Price.of({"prompt": 1e-6, "completion": "0.000004", "input_cache_read": 1e-7})
CLAUDE = TeacherSpec(name="opus", model="anthropic/claude-opus-4.7", is_distillable=False)
LOCAL = TeacherSpec(name="local", model="m", base_url="http://127.0.0.1:8000/v1")
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
    assert request["parallel_tool_calls"] is False
    assert request["tools"] == TOOLS
    assert request["provider"]["max_price"] == {"prompt": 1.0, "completion": 4.0}
    assert request["provider"]["require_parameters"] is True
    assert request["provider"]["data_collection"] == "deny"
    assert request["provider"]["enforce_distillable_text"] is False
    assert request["session_id"] == "session"
    assert request["metadata"] == {"state_id": "s1"}
    assert request["cache_control"] == {"type": "ephemeral"}
    assert request["max_completion_tokens"] == 4096
    open_weights = CLAUDE.model_copy(update={"model": "z-ai/glm-4.6", "is_distillable": True})
    assert body(open_weights)["provider"]["enforce_distillable_text"] is True
    assert "cache_control" not in body(open_weights)


@pytest.mark.parametrize("dialect", ["vllm", "ollama", "llama.cpp", "transformers", "litellm"])
def test_other_servers_get_a_plain_body(dialect):
    request = body(LOCAL.model_copy(update={"dialect": dialect}))
    known = {"model", "messages", "tools", "max_tokens", "parallel_tool_calls"}
    assert request.keys() <= known
    assert request["max_tokens"] == 4096


def test_a_dialect_is_known_by_its_address():
    at = {
        "https://openrouter.ai/api/v1": "openrouter",
        "https://eu.openrouter.ai/api/v1": "openrouter",
        "http://localhost:11434/v1": "ollama",
        "http://proxy:4000": "litellm",
        "http://127.0.0.1:8000/v1": "openai",
        "https://openrouter.ai.example.com/v1": "openai",
    }
    for base_url, dialect in at.items():
        assert dialect_of(LOCAL.model_copy(update={"base_url": base_url})) == dialect


def test_the_hash_names_the_question_and_nothing_else():
    same = [
        sha(),
        sha(CLAUDE.model_copy(update={"base_url": "http://127.0.0.1:1", "timeout_s": 5.0})),
        sha(state=state(state_id="other", session_id="elsewhere")),
        sha(accepted_terms=frozenset({"x"}), data_collection="allow"),
    ]
    assert len(set(same)) == 1
    different = [
        sha(),
        sha(CLAUDE.model_copy(update={"name": "opus-2"})),
        sha(CLAUDE.model_copy(update={"params": {"temperature": 0.2}})),
        sha(state=state(messages=[{"role": "user", "content": "hullo"}])),
        sha(state=state(tools=[])),
        sha(window="token_budget:1000"),
        sha(max_completion_tokens=100),
    ]
    assert len(set(different)) == len(different)


def test_a_prompt_bound_is_above_bytes_unless_a_recorded_count_says_less():
    builder = RequestBuilder(RequestOptions())
    long = state(messages=[{"role": "user", "content": "x" * 40_000}])
    bytes_only = builder.question(long, CLAUDE).prompt_bound_tokens
    recorded = builder.question({**long, "n_context_tokens": 11_000}, CLAUDE).prompt_bound_tokens
    far_too_low = builder.question({**long, "n_context_tokens": 10}, CLAUDE).prompt_bound_tokens
    assert bytes_only > 40_000
    assert 22_000 < recorded < 24_000
    assert far_too_low > 20_000


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


def test_overrides_count_at_their_dearest():
    price = Price.of(
        {
            "prompt": "0.000001",
            "completion": "0.000002",
            "overrides": [{"min_prompt_tokens": 200_000, "prompt": "0.000003"}],
        }
    )
    assert (price.prompt, price.completion, price.cache_read) == (3_000_000, 2_000_000, 3_000_000)


def test_price_lists_are_kept_refreshed_and_refused_when_stale(tmp_path):
    now = [datetime(2026, 11, 1, tzinfo=UTC)]
    listing = [{"id": "a/b", "pricing": {"prompt": "1e-6", "completion": "2e-6"}}]
    teacher = TeacherSpec(name="t", model="a/b", base_url="https://x/v1")
    PriceBook(folder=tmp_path, now=lambda: now[0]).remember("https://x/v1", listing)
    book = PriceBook(folder=tmp_path, now=lambda: now[0])
    assert book.fresh("https://x/v1")
    price = book.price(teacher)
    assert (price.prompt, price.source) == (10**6, "https://x/v1/models")
    assert price.date == "2026-11-01T00:00:00+00:00"
    now[0] += timedelta(days=2)
    assert not book.fresh("https://x/v1")
    assert book.price(teacher).prompt == 10**6
    now[0] += timedelta(days=6)
    with pytest.raises(PriceError, match="prices of https://x/v1 are from 2026-11-01"):
        book.price(teacher)
    assert book.price(teacher.model_copy(update={"price": {"prompt": 0.5}})).prompt == 5 * 10**11
    [path] = tmp_path.iterdir()
    path.write_text("{broken")
    with pytest.raises(PriceError, match="no price for a/b"):
        PriceBook(folder=tmp_path).price(teacher)


def test_a_router_that_prices_by_whim_is_refused():
    book = PriceBook()
    book.remember("https://x/v1", [{"id": "auto", "pricing": {"prompt": "-1", "completion": "-1"}}])
    with pytest.raises(PriceError, match="no price for auto"):
        book.price(TeacherSpec(name="t", model="auto", base_url="https://x/v1"))
