"""What is found before a forward pass: counted by reason, and refused above a share."""

import pytest

from tests.trainer.families import CHATML
from tests.trainer.published import assistant, rows_of
from trainer.data.dataset import PreferenceData
from trainer.data.preflight import PreflightOptions, preflight
from trainer.data.rendering import Renderer
from trainer.errors import DatasetError, TrainerConfigError

SAYS = {"role": "assistant", "content": "I stop here."}
EMPTY = {"role": "assistant", "content": ""}

LENIENT = PreflightOptions(max_cut_prompts=1.0, max_unusable_pairs=1.0)


def renderer(tokenizer, **options) -> Renderer:
    return Renderer(
        tokenizer=tokenizer, **{"max_prompt_tokens": 2000, "max_response_tokens": 200} | options
    )


def test_a_dataset_that_fits_is_counted_and_kept(tokenizer):
    rows = rows_of(2)
    found = preflight(renderer(tokenizer), PreferenceData(pairs=rows), PreflightOptions())
    assert found.usable == list(range(len(rows)))
    assert (found.n_identical_sides, found.n_empty_completions, found.n_cut_prompts) == (0, 0, 0)
    assert found.rendered_as_text == {}


def test_sides_that_are_the_same_tokens_are_counted_and_refused_above_a_share(tokenizer):
    rows = rows_of(3)
    rows[0] = rows[0] | {"chosen": [SAYS], "rejected": [SAYS]}
    rows[1] = rows[1] | {"rejected": [EMPTY]}
    found = preflight(
        renderer(tokenizer), PreferenceData(pairs=rows), PreflightOptions(max_unusable_pairs=0.2)
    )
    assert (found.n_identical_sides, found.n_empty_completions) == (1, 1)
    assert found.usable == list(range(2, len(rows)))
    with pytest.raises(DatasetError, match="2 of 12 pairs teach nothing: 1 have two identical"):
        preflight(renderer(tokenizer), PreferenceData(pairs=rows), PreflightOptions())


def test_cut_prompts_and_responses_are_counted(tokenizer):
    small = renderer(tokenizer, max_prompt_tokens=220, max_response_tokens=24)
    data = PreferenceData(pairs=rows_of(3))
    found = preflight(small, data, PreflightOptions(max_cut_prompts=1.0, max_unusable_pairs=1.0))
    assert found.n_cut_prompts > 0
    assert found.n_cut_responses > 0
    assert found.cut.n_dropped_steps > 0
    with pytest.raises(DatasetError, match="do not fit into max_prompt_tokens=220"):
        preflight(small, data, PreflightOptions(max_cut_prompts=0.1, max_unusable_pairs=1.0))


def test_a_template_without_tool_calls_is_refused_where_text_is_forbidden(tokenizer):
    other = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    other.chat_template = CHATML
    data = PreferenceData(pairs=rows_of(2))
    found = preflight(renderer(other), data, PreflightOptions())
    assert set(found.rendered_as_text) == {"tool calls", "tool results", "lists of tools"}
    assert found.n_identical_sides == 0
    strict = PreflightOptions(plain_rendering=False)
    with pytest.raises(TrainerConfigError, match="can't show lists of tools, tool calls"):
        preflight(renderer(other), data, strict)
    without = PreferenceData(
        pairs=[row | {"prompt": row["prompt"][:1], "tools": None} for row in rows_of(1)]
    )
    texts = [
        row | {"chosen": [SAYS], "rejected": [SAYS | {"content": "b"}]} for row in without.pairs
    ]
    assert preflight(renderer(other), PreferenceData(pairs=texts), strict).rendered_as_text == {}


def test_rows_whose_prompt_cannot_hold_what_it_must_are_left_out_and_counted(tokenizer):
    rows = rows_of(2)
    long = " ".join(f"word{i}" for i in range(400))
    said = {"role": "user", "content": long}
    rejected = assistant("Edit", old_string=long, new_string="x")
    rows[3] = rows[3] | {"prompt": [said], "rejected": [rejected]}
    found = preflight(
        renderer(tokenizer, max_prompt_tokens=300), PreferenceData(pairs=rows), LENIENT
    )
    assert found.refused == {"pairs": 1}
    assert "what the sides name" in found.refusal
    assert found.usable == [i for i in range(len(rows)) if i != 3]
    with pytest.raises(DatasetError, match="no pair fits into max_prompt_tokens=20"):
        preflight(renderer(tokenizer, max_prompt_tokens=20), PreferenceData(pairs=rows), LENIENT)
