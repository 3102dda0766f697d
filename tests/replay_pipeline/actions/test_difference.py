"""What two actions differ in, and equality by the schema of a foreign tool."""

import pytest

from replay_pipeline.actions import agreement_level, canonical_action
from replay_pipeline.actions.difference import FACTS, IN_WORDS, difference, words_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"type": "string", "description": "Unit (default: 'metric')."},
                    "days": {"type": "integer", "default": 5},
                    "share": {"type": "number", "description": "Default is 0.5"},
                    "tags": {"type": "array", "description": "Tags, in any order."},
                    "steps": {"type": "array", "description": "Tags, as they come."},
                    "quiet": {"type": "boolean"},
                },
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "news")
]
PROMPT = [{"role": "user", "content": "The weather in Paris, France, on May 3rd 2022 in 4 days?"}]


def action(*calls, text=""):
    called = [{"function": {"name": name, "arguments": given}} for name, given in calls]
    return canonical_action({"content": text, "tool_calls": called}, tools=TOOLS)


def weather(city="Paris", **more):
    return action(("weather", {"city": city, **more}))


@pytest.mark.parametrize(
    ("chosen", "rejected", "facts"),
    [
        (weather(), weather(), ""),
        (weather(), weather(days=5), "default"),
        (weather(), weather("paris."), "form"),
        (weather("2022-05-03"), weather("May 3rd 2022"), "form"),
        (weather(), weather("'Paris'"), "unwraps"),
        (weather("{Paris}"), weather(), "wraps"),
        (weather(), weather(quiet=False), "idle"),
        (weather("Paris"), weather("Paris, France"), "qualifies"),
        (weather("UK"), weather("United Kingdom"), "abbreviates"),
        (weather("the Paris"), weather("Paris"), "longer makes_up"),
        (weather("Paris"), weather("Paris weather now"), "shorter made_up"),
        (weather(), weather("Berlin"), "text made_up"),
        (weather(), weather("{city: Paris}"), "code made_up"),
        (weather(), weather(""), "empty"),
        (weather(days=4), weather(days=40), "scale made_up"),
        (weather(days=4), weather(days=7), "number made_up"),
        (weather(days=4), weather(), "adds"),
        (weather(), weather(days=4), "omits"),
        (weather(where={"lat": 4, "lon": 5}), weather(where={"lat": 4}), "adds makes_up"),
        (weather(where={"lat": 4}), weather(where={"lat": 5}), "number made_up"),
        (weather(tags=["a", "b"]), weather(tags=["a"]), "list makes_up"),
        (weather(), action(("news", {"city": "Paris"})), "tool"),
        (weather(), action(text="Which Paris?"), "turn"),
        (action(text="No."), action(text="Never."), "words"),
        (weather(), action(*[("weather", {"city": c}) for c in ("Paris", "Lyon")]), "fewer"),
        (action(*[("weather", {"city": c}) for c in ("Lyon", "Paris")]), weather(), "more"),
    ],
)  # fmt: skip
def test_the_facts_of_a_difference(chosen, rejected, facts):
    assert difference(chosen, rejected, TOOLS, PROMPT).facts == set(facts.split())


def test_a_look_against_anything_is_told_as_one():
    one, other = (canonical_action(f'{name} {{"file_path":"a.py"}}') for name in ("Read", "Glob"))
    assert difference(one, other).facts == {"words"}, "a rendered action is a text here"
    look = canonical_action(
        {"tool_calls": [{"function": {"name": "Read", "arguments": {"file_path": "a.py"}}}]}
    )
    assert difference(look, weather()).facts == {"tool", "looks", "coding"}


def test_every_fact_has_words():
    assert IN_WORDS.keys() == set(FACTS)
    assert words_of(["number", "default"]) == (
        "the sides differ in an argument that is the default, a number"
    )
    assert words_of([]) == ""


@pytest.mark.parametrize(
    ("one", "other", "level"),
    [
        (weather(), weather(days=5), "effect"),
        (weather(), weather(unit="metric"), "effect"),
        (weather(), weather(share=0.5), "effect"),
        (weather(tags=["a", "b"]), weather(tags=["b", "a"]), "effect"),
        (weather(share=1.0), weather(share=1), "exact"),
        (weather(), weather(share=0), "tool"),
        (weather(), weather(days=4), "tool"),
        (weather(), weather(unit="imperial"), "tool"),
        (weather(steps=["a", "b"]), weather(steps=["b", "a"]), "tool"),
        (weather(tags=["a", "b"]), weather(tags=["b", "c"]), "tool"),
    ],
)
def test_the_schema_says_what_makes_no_difference(one, other, level):
    assert agreement_level(one, other) == agreement_level(other, one) == level
