"""The prompt-blind control finds what shows without the prompt, and nothing where nothing shows."""

import json
import random

import pytest

from replay_pipeline.publish import blind, blind_control, in_words, publish
from replay_pipeline.stages.audit.dataset import prompts_decide
from tests.replay_pipeline.publish.rows import kept_row, kept_table


def message(tool, text):
    call = {"function": {"name": tool, "arguments": {"command": text}}}
    return json.dumps({"role": "assistant", "content": "", "tool_calls": [call]})


def pairs(n=200, *, better="", worse="", tool=None, longer=0, seed=3):
    """Pairs of 20 sessions whose sides are words at random, apart from what is planted."""
    draw = random.Random(seed)
    words = [f"{a}{b}" for a in ("ca", "to", "re", "mu") for b in ("ke", "lin", "pod", "sar")]

    def text():
        return " ".join(draw.choices(words, k=8))

    chosen = [message(tool or "Bash", text() + better + "x" * longer) for _ in range(n)]
    rejected = [message("Bash", text() + worse) for _ in range(n)]
    return chosen, rejected, [f"session {n % 20}" for n in range(n)]


def test_sides_that_only_the_prompt_tells_apart_are_a_coin():
    found = blind_control(*pairs())
    assert (found.n_pairs, found.n_sessions) == (200, 20)
    assert 0.4 < found.ngrams < 0.6
    assert 0.4 < found.length < 0.6
    assert found.tools == 0.5
    assert in_words(found.to_json()).endswith("mostly it takes the prompt to tell.")


def test_a_word_that_one_side_likes_is_found():
    found = blind_control(*pairs(worse=" todo"))
    assert found.ngrams > 0.95
    assert "without reading the prompt" in in_words(found.to_json())


@pytest.mark.slow
def test_length_and_tools_are_measured_by_themselves():
    found = blind_control(*pairs(longer=12))
    assert found.length > 0.9
    assert found.tools == 0.5
    assert blind_control(*pairs(tool="Read")).tools == 1.0


def test_what_is_true_of_one_session_only_does_not_count():
    chosen, rejected, sessions = pairs()
    for row in range(200):
        marked = chosen if row % 2 else rejected
        word = "abcdefghijklmnopqrst"[row % 20] * 9
        marked[row] = json.dumps({**json.loads(marked[row]), "content": word})
    assert blind_control(chosen, rejected, sessions).ngrams < 0.65


@pytest.mark.parametrize("rows", [pairs(19), (*pairs()[:2], ["one"] * 200), ([], [], [])])
def test_too_little_says_nothing(rows):
    assert blind_control(*rows) is None
    assert "Too few" in in_words(None)


@pytest.mark.slow
def test_equal_pairs_in_any_order_give_equal_figures_of_as_many_as_are_measured(monkeypatch):
    monkeypatch.setattr(blind, "_MAX_PAIRS", 100)
    chosen, rejected, sessions = pairs(120, worse=" todo")
    one = blind_control(chosen, rejected, sessions)
    assert one == blind_control(chosen[::-1], rejected[::-1], sessions[::-1])
    assert one.n_pairs == 100


def published(tmp_path, word):
    rows = [
        kept_row(
            n,
            session=f"session {n % 5}",
            chosen_messages_json=f"[{json.dumps({'role': 'assistant', 'content': f'fix {n}'})}]",
            rejected_messages_json=f"[{json.dumps({'role': 'assistant', 'content': word})}]",
        )
        for n in range(40)
    ]
    return publish([("b", kept_table(*rows))], folder=tmp_path / "set")


def test_every_publication_carries_its_control(tmp_path, caplog):
    report = published(tmp_path, "todo")
    assert report.blind["ngrams"] == 1.0
    card = (tmp_path / "set" / "README.md").read_text("utf-8")
    assert f"## Prompt-blind control\n\n{in_words(report.blind)}" in card
    assert "without reading the prompt" in caplog.text
    verdict = prompts_decide(tmp_path / "set")
    assert verdict.is_warning
    assert not verdict.holds
    assert verdict.facts["ngrams"] == 1.0


def test_a_dataset_that_takes_the_prompt_passes_the_check(tmp_path):
    report = publish([("b", kept_table(*range(4)))], folder=tmp_path / "set")
    assert report.blind is None
    assert prompts_decide(tmp_path / "set").holds
    assert prompts_decide(tmp_path / "nothing").holds
