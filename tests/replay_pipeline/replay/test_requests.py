from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from replay_pipeline.errors import ConfigError, PriceError
from replay_pipeline.replay.asking import Asking, check
from replay_pipeline.replay.dialects import DIALECTS, RequestOptions, dialect_of
from replay_pipeline.replay.prices import Price, PriceBook
from replay_pipeline.replay.replies import read_reply
from replay_pipeline.replay.requests import RequestBuilder, with_recorded_names
from replay_pipeline.replay.sizes import Learned, Size
from replay_pipeline.types import TeacherSpec

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
    for tools, problem in ((TOOLS, "no endpoint of this model lists tools"), ([], None)):
        request = builder.body(state(tools=tools), CLAUDE, price)
        assert builder.broken_rule(request, CLAUDE, price) == problem


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


def test_anthropics_own_protocol_is_spoken_both_ways():
    teacher = LOCAL.model_copy(update={"base_url": "https://api.anthropic.com/v1"})
    builder = RequestBuilder(RequestOptions())
    raw = builder.body(state(messages=HISTORY), teacher, PRICE)
    assert builder.broken_rule(raw, teacher, None) is None
    request = msgspec.json.decode(raw)
    assert [turn["role"] for turn in request["messages"]] == ["user", "assistant", "user"]
    assert request["system"][0]["text"] == "You code."
    assert request["messages"][1]["content"][1]["input"] == {"command": "ls"}
    results = request["messages"][2]["content"]
    assert [block["tool_use_id"] for block in results] == ["a", "b"]
    assert "cache_control" in results[-1]
    assert request["tools"][0]["input_schema"] == NO_ARGUMENTS
    reply = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "stop_reason": "tool_use",
        "content": [{"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "ls"}}],
        "usage": {"input_tokens": 10, "output_tokens": 7, "cache_read_input_tokens": 100,
                  "cache_creation_input_tokens": None},
    }  # fmt: skip
    answer = read_reply(200, {}, dialect_of(teacher).reply(msgspec.json.encode(reply)))
    assert answer.error_code is None
    assert answer.action["tool_calls"][0]["function"] == {
        "name": "Bash", "arguments": '{"command":"ls"}'
    }  # fmt: skip
    assert (answer.usage.n_prompt_tokens, answer.usage.n_cached_tokens) == (110, 100)
    error = b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}'
    assert read_reply(529, {}, dialect_of(teacher).reply(error)).code == "overloaded"


def test_a_tool_with_a_name_that_no_provider_takes_goes_by_another_and_comes_back():
    long = "mcp__" + "server_of_a_very_long_name" * 3 + "__do"
    asked = state(tools=[{"type": "function", "function": {"name": long}}])
    builder = RequestBuilder(RequestOptions())
    raw = builder.body(asked, CLAUDE, PRICE)
    [tool] = msgspec.json.decode(raw)["tools"]
    sent = tool["function"]["name"]
    assert builder.broken_rule(raw, CLAUDE, PRICE) is None
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
        "https://api.anthropic.com/v1": "anthropic",
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


SCORED = TeacherSpec(name="t", model="m", base_url="http://127.0.0.1:8000/v1", top_logprobs=5)
OFFERS_LOGPROBS = ("openrouter", "openai", "azure", "vllm", "llama.cpp", "ollama", "litellm")


@pytest.mark.parametrize("dialect", OFFERS_LOGPROBS)
def test_token_probabilities_are_asked_for_as_openai_has_it(dialect):
    listed = Price.of(
        {"prompt": 1, "completion": 1},
        supported_parameters=("max_tokens", "tools", "logprobs", "top_logprobs"),
    )
    teacher = SCORED.model_copy(update={"dialect": dialect})
    request = body(teacher, price=listed)
    assert (request["logprobs"], request["top_logprobs"]) == (True, 5)
    builder = RequestBuilder(RequestOptions())
    assert builder.broken_rule(msgspec.json.encode(request), teacher, listed) is None
    assert not {"logprobs", "top_logprobs"} & body(LOCAL, price=listed).keys()


def test_a_question_with_token_probabilities_is_another_one_and_others_keep_their_hash():
    plain = SCORED.model_copy(update={"top_logprobs": 0})
    assert len({sha(SCORED), sha(plain), sha(SCORED.model_copy(update={"top_logprobs": 4}))}) == 3
    assert "top_logprobs" not in plain.model_dump()
    assert plain.model_dump() == {**SCORED.model_dump(exclude={"top_logprobs"})}


@pytest.mark.parametrize("dialect", sorted({*DIALECTS} - {*OFFERS_LOGPROBS}))
def test_servers_without_token_probabilities_are_refused_before_the_first_cent(dialect):
    teacher = SCORED.model_copy(update={"dialect": dialect})
    with pytest.raises(ConfigError, match="offers no token probabilities; set its top_logprobs"):
        check([teacher], 1.0, Asking())


@pytest.mark.parametrize("wrong", [-1, 21, 2.5])
def test_no_more_alternatives_are_asked_for_than_endpoints_give(wrong):
    with pytest.raises(ValidationError, match="top_logprobs"):
        TeacherSpec(name="t", model="m", top_logprobs=wrong)


def entry(token, logprob, *others, given="text"):
    spelled = [*token.encode()] if given == "bytes" else None
    return {
        "token": token,
        "logprob": logprob,
        "bytes": spelled,
        "top_logprobs": [entry(*other, given=given) for other in others],
    }


def scored_reply(content, **choice):
    message = {"role": "assistant", "content": "Hi"}
    choice = {"message": message, "finish_reason": "stop", "logprobs": content, **choice}
    return read_reply(200, {}, msgspec.json.encode({"choices": [choice], "usage": {"cost": 0.1}}))


@pytest.mark.parametrize("given", ["bytes", "text"])
def test_tokens_and_alternatives_are_read_with_the_written_token_first(given):
    """OpenAI may leave the written token out of its alternatives, llama.cpp and vLLM name it."""
    content = [
        entry("Hi", -0.5, ("Hey", -0.4), ("Hi", -0.5), given=given),
        entry("!", -9999.0, (".", -0.01), given=given),
    ]
    answer = scored_reply({"content": content, "refusal": None})
    assert answer.logprobs == [
        [("Hi", -0.5), ("Hey", -0.4)],
        [("!", -9999.0), (".", -0.01)],
    ]


def test_half_characters_are_kept_as_bytes():
    halves = [
        {"token": "\ufffd", "bytes": [195], "logprob": -1.0, "top_logprobs": []},
        {"token": "\ufffd", "bytes": [169], "logprob": -0.1, "top_logprobs": []},
    ]
    assert scored_reply({"content": halves}).logprobs == [[([195], -1.0)], [([169], -0.1)]]


@pytest.mark.parametrize(
    "odd",
    [
        None, [], {}, {"content": None}, {"content": "x"}, {"content": []}, {"content": [3]},
        {"content": [entry("a", -1.0), {"token": None, "logprob": -1.0}]},
        {"content": [{"token": "a", "logprob": None}]},
        {"content": [{"token": "a", "logprob": -1.0, "bytes": [400]}]},
        {"content": [{"token": "a", "logprob": -1.0, "bytes": ["a"]}]},
    ],
    ids=repr,
)  # fmt: skip
def test_an_answer_is_kept_without_what_cannot_be_read(odd):
    """One token less would move all that follow it, so that none are kept."""
    answer = scored_reply(odd)
    assert (answer.logprobs, answer.error_code) == (None, None)
    assert answer.action == {"role": "assistant", "content": "Hi"}


def test_streamed_token_probabilities_are_joined():
    chunks = [
        {"choices": [{"delta": {"content": text}, "logprobs": {"content": [entry(text, -1.0)]}}]}
        for text in ("Hi", " you")
    ]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"cost": 0.1}})
    stream = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)
    answer = read_reply(200, {"content-type": "text/event-stream"}, stream)
    assert answer.logprobs == [[("Hi", -1.0)], [(" you", -1.0)]]
