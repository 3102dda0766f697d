"""Questions of a benchmark's checkout become sessions that `ingest` reads."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.scored_answers import CATEGORIES, DATA, Answers, questions
from replay_pipeline import ClaudeCodeIngester
from replay_pipeline.testing.router import Router, Script

RECIPE = Path(__file__).parents[3] / "recipes" / "real_answers"
AREA = {
    "name": "shape.area",
    "description": "Area of a rectangle.",
    "parameters": {
        "type": "dict",
        "properties": {
            "width": {"type": "float", "description": "In meters."},
            "height": {"type": "float", "description": "In meters, the default is 1."},
        },
        "required": ["width"],
    },
}
ASKED = {
    "simple": ("How large is 2 by 3 meters?", [{"shape_area": '{"width": 2, "height": 3}'}], True),
    "parallel_function": ("And 2, and 4?", "[shape.area(width=2), shape.area(width=4)]", False),
    "relevance": ("Who wrote Faust?", "None of the functions tells.", True),
}
RIGHT = {"shape.area": {"width": [2], "height": [3, 3.0], "unit": ["", "m"]}}


@pytest.fixture(scope="module")
def bench():
    """The module of the recipe, which is a folder of scripts and no package."""
    sys.path.insert(0, str(RECIPE))
    try:
        import asked

        yield asked
    finally:
        sys.path.remove(str(RECIPE))
        sys.modules.pop("asked", None)


@pytest.fixture
def checkouts(tmp_path):
    """One model's answers to three made-up questions, as both checkouts hold them."""

    def write(path, rows):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")

    for category, file in CATEGORIES.items():
        text, result, is_right = ASKED.get(category, ("", "", True))
        is_asked, key = category in ASKED, f"{category}_0"
        of = tmp_path / "answers" / "2024-08-11"
        name = f"gorilla_openfunctions_v1_test_{category}_result.json"
        write(of / "result" / "gpt-x" / name, [{"id": key, "result": result}] * is_asked)
        failed = [] if is_right else [{"id": 1, "prompt": {"id": key}}]
        write(of / "score" / "gpt-x" / f"{category}_score.json", [{"accuracy": 1}, *failed])
        row = {"id": f"{file}_0", "question": [[{"role": "user", "content": text}]]}
        write(
            tmp_path / "questions" / DATA / f"{file}.json", [row | {"function": [AREA]}] * is_asked
        )
    right = {"id": "simple_python_0", "ground_truth": [RIGHT]}
    folder = tmp_path / "questions" / DATA / "possible_answer"
    write(folder / f"{CATEGORIES['simple']}.json", [right])
    return tmp_path / "answers", tmp_path / "questions"


def test_questions_become_sessions_with_the_agents_action_and_their_tools(
    bench, checkouts, tmp_path
):
    answers, asked = Answers(checkouts[0]), questions(checkouts[1])
    own = answers.of("gpt-x")
    assert {key: answer.is_right for key, answer in own.items()} == {
        "simple_0": True, "parallel_function_0": False, "relevance_0": True}  # fmt: skip
    bench.write_sessions(tmp_path / "sessions", asked, list(own), "gpt-x", own)

    states = ClaudeCodeIngester().ingest(tmp_path / "sessions")
    by_key = {state["session_id"]: state for state in states}
    did = {
        key: [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in state["student_action"].get("tool_calls") or ()
        ]
        for key, state in by_key.items()
    }
    assert did == {
        "simple_0": [("shape_area", {"width": 2, "height": 3})],
        "parallel_function_0": [("shape_area", {"width": 2}), ("shape_area", {"width": 4})],
        "relevance_0": [],
    }
    assert by_key["relevance_0"]["student_action"]["content"] == ASKED["relevance"][1]
    for key, state in by_key.items():
        assert state["student_model"] == "openai/gpt-x"
        assert [m["role"] for m in state["messages"]] == ["system", "user"]
        assert state["messages"][1]["content"] == ASKED[bench.category_of(key)][0]
        [tool] = state["tools"]
        assert tool["function"]["name"] == "shape_area"
        width = tool["function"]["parameters"]["properties"]["width"]
        assert width == {"type": "number", "description": "In meters."}


def test_the_first_right_values_are_an_answer(bench, checkouts):
    right = bench.right_answers(checkouts[1])
    assert bench.first_right(right["simple_0"]) == [("shape_area", {"width": 2, "height": 3})]


def test_the_loopback_server_charges_a_named_list_price():
    router = Router(Script(prices={"openai/gpt-x": (0.5, 2.0)}))
    assert router.models["openai/gpt-x"].cost_nano(1000, 0, 0, 100) == 700_000
