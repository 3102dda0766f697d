"""Pairs as the page has them, the marks, and the text view; the page itself runs in tests/browser."""

import json

import pytest

from replay_pipeline.errors import ConfigError, StorageError
from replay_pipeline.publish.layout import pair_rows
from replay_pipeline.stages.pages.files import inert
from replay_pipeline.stages.pages.pairs import in_portions, portion, read_marks
from replay_pipeline.stages.pages.sides import over_lines
from replay_pipeline.storage.pair_rows import table_with_prompts
from replay_pipeline.types import TeacherAction
from tests.replay_pipeline.judge.test_extract import answers
from tests.support.messages import bash, call
from tests.support.votes import extract_pairs

ATTACK = "</script><script>alert(1)</script><!-- \u2028 & <img src=x onerror=alert(1)>"


def state(state_id="cc1_abc", **more):
    return {
        "state_id": state_id,
        "session_id": "session",
        "messages": [{"role": "user", "content": f"Fix it. {ATTACK}"}],
        "student_action": bash("make"),
        "student_model": "claude-opus-4-5",
        **more,
    }


@pytest.fixture
def judged():
    states = [state(hint=ATTACK), state("cc1_xyz")]
    rows = [
        *answers(
            "cc1_abc",
            deepseek=bash(f"echo '{ATTACK}'"),
            qwen=bash(f"echo '{ATTACK}'"),
            glm=bash("ls"),
        ),
        *answers("cc1_xyz", deepseek=bash("ls"), qwen=bash("tox")),
    ]
    rows.append(
        TeacherAction(
            state_id="cc1_xyz", teacher="glm", error_code="502", error_message="Bad gateway"
        )
    )
    return states, rows, extract_pairs(states, rows)


def test_session_text_of_a_portion_is_only_data(judged):
    _, _, report = judged
    shown = portion(ATTACK, report.pairs, report.outcomes)
    assert shown["title"] == ATTACK
    assert shown["items"][0]["hint"] == ATTACK
    assert {item["outcome"] for item in shown["items"]} == {"pair", "no_consensus"}
    assert "<" not in inert(json.dumps(shown))
    assert json.loads(inert(json.dumps(shown)))["title"] == ATTACK


def test_the_diff_of_the_files_is_on_the_page(judged):
    _, _, report = judged
    pair = report.pairs[0]
    done = {"result": "works, check fixed", "diff": "--- cart.py\n+++ cart.py\n+total = 0"}
    failed = {"result": "fails: not_found", "answer": "File does not exist."}
    trials = json.dumps({pair["chosen"]: done, pair["rejected"]: failed})
    row = {"trials_json": trials}
    item = portion("tried", [pair], results={pair["state_id"]: row})["items"][0]
    assert item["tried"] == {"chosen": done, "rejected": failed}


def test_batches_are_shown_in_portions_the_newest_first():
    sizes = [("a", 3), ("b", 2), ("c", 9), ("d", 1)]
    assert list(in_portions(sizes, 5)) == [["d"], ["c"], ["a", "b"]]
    assert list(in_portions(sizes, 100)) == [["a", "b", "c", "d"]]
    assert list(in_portions([], 5)) == []


@pytest.mark.parametrize(
    ("text", "error", "what"),
    [
        (None, StorageError, "cannot be read"),
        ("{", ConfigError, "not JSON"),
        ("[]", ConfigError, "not an export"),
        ('{"format": "replay-pipeline marks 2", "marks": []}', ConfigError, "not an object"),
        (
            '{"format": "replay-pipeline marks 2", "marks": {"s": "maybe"}}',
            ConfigError,
            "s: 'maybe' is neither",
        ),
    ],
)
def test_other_files_are_no_marks(tmp_path, text, error, what):
    path = tmp_path / "marks.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=what):
        read_marks(path)


def test_sides_are_shown_as_they_are_published():
    path = {"type": "string", "description": "The absolute path to the file"}
    schema = {
        "type": "object",
        "properties": {"offset": {"type": "integer"}, "file_path": path},
        "required": ["file_path"],
    }
    pair = {
        "state_id": "cc1_abc",
        "state_messages": [{"role": "user", "content": "Read on."}],
        "tools": [{"type": "function", "function": {"name": "Read", "parameters": schema}}],
        "cwd": "/work/shop",
        "chosen": "chosen",
        "rejected": "rejected",
        "chosen_action": call("Read", file_path="src/cart.py", offset=5),
        "rejected_action": call("Read", file_path="/work/shop/src/tax.py"),
        "n_teachers_agreeing": 2,
    }
    messages = {f"{side}_messages": [pair[f"{side}_action"]] for side in ("chosen", "rejected")}
    published = pair_rows(table_with_prompts([pair | messages]), "batch").to_pylist()[0]
    item = portion("pairs", [pair])["items"][0]
    for side, column in (("rejected", 0), ("chosen", 1)):
        lines = [row[column] for row in item["diff"] if row[column] is not None]
        said = "\n".join("".join(text for text, _ in line) for line in lines)
        assert said == over_lines(published[side][-1])
    assert item["headline"] == "Read /work/shop/src/cart.py"
