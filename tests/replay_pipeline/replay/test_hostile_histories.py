"""Requests for histories that nobody has tamed, judged by rules that share no code with the builder."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay_pipeline.replay.dialects.base import RequestOptions
from replay_pipeline.replay.dialects.prices import Price
from replay_pipeline.replay.dialects.requests import RequestBuilder
from replay_pipeline.types import TeacherSpec
from tests.support.provider_rules import complaint

OPUS = TeacherSpec(name="opus", model="anthropic/claude-opus-4.7", is_distillable=False)
PRICE = Price.of({"prompt": 1e-6, "completion": 4e-6, "input_cache_read": 1e-7})

NAMES = st.sampled_from(
    ["Read", "Bash", 'Task" >\n<parameter name="description', "", "a b", "x" * 90, "mcp__a.b__c",
     "読む", "functions:Read"]
)  # fmt: skip
TEXTS = st.one_of(
    st.none(), st.just(""), st.just("  \n"), st.text(max_size=20),
    st.characters(categories=["Cs"]), st.integers(), st.lists(st.text(max_size=3), max_size=2),
    st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url", "thinking"])},
             optional={"text": st.text(max_size=5),
                       "image_url": st.fixed_dictionaries({"url": st.text(max_size=9)})}), max_size=2),
)  # fmt: skip
IDS = st.sampled_from(["a", "b", "toolu_01", "", "with space", "i" * 60, None, 7])
ARGUMENTS = st.one_of(
    st.sampled_from(["{}", '{"a": 1}', "", "[1]", "null", "{", '{"a": NaN}', '"x"', None, 3]),
    st.text(max_size=12), st.just({"a": 1}),
)  # fmt: skip
CALLS = st.lists(
    st.fixed_dictionaries(
        {"id": IDS, "type": st.just("function"),
         "function": st.fixed_dictionaries({"name": NAMES, "arguments": ARGUMENTS})}
    ),
    max_size=3,
)  # fmt: skip
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "developer", "x"]), "content": TEXTS}),
        st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXTS},
                              optional={"tool_calls": CALLS, "reasoning": st.just("hm")}),
        st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": IDS, "content": TEXTS}),
    ),
    max_size=8,
)  # fmt: skip
SCHEMAS = st.sampled_from(
    [None, {}, {"type": "string"}, {"type": "object", "oneOf": [], "required": ["no"]},
     {"type": "object", "properties": {"a b": {}, "list": {"type": ["array", "null"]}}}]
)  # fmt: skip
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function"),
         "function": st.fixed_dictionaries({"name": NAMES}, optional={"parameters": SCHEMAS, "description": st.text(max_size=5)})}
    ),
    max_size=3,
)  # fmt: skip


@pytest.mark.slow
@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(messages=MESSAGES, tools=TOOLS, n_asked=st.integers(0, 8))
def test_no_hostile_history_makes_an_invalid_request(messages, tools, n_asked):
    state = {"state_id": "s", "session_id": "x", "messages": messages, "tools": tools,
             "student_action": {"role": "assistant", "content": "ls"}}  # fmt: skip
    builder = RequestBuilder(RequestOptions())
    body = builder.body(state, OPUS, PRICE, n_asked=n_asked)
    assert complaint(msgspec.json.decode(body)) is None
