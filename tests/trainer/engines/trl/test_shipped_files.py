"""The settings files that come with the trainer: each makes two steps."""

import json
import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.trainer.families import CHATML, save_family
from tests.trainer.published import write_dataset
from trainer.__main__ import main
from trainer.engines.trl import ComposerConfig
from trainer.errors import TrainerConfigError

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[4]
FILES = {
    "trainer/tiny.yaml": None,
    "trainer/demo.yaml": "llama3",
    "trainer/pretrained.yaml": "llama3",
    "trainer/gpu.yaml": "qwen3",
    "recipes/trl/three_channels.yaml": None,
}
"""By file the family of models that it is for (SmolLM2 is a Llama with the template below); none is the
tiny one that the trainer makes."""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_every_file_makes_two_steps_with_the_family_that_it_is_for(name, tmp_path):
    dataset = write_dataset(tmp_path / "dataset")
    given = {"dataset": dataset, "output": tmp_path / "out", "trl.max_steps": 2}
    given["preflight.max_cut_prompts"] = 1.0
    given |= {
        "evaluation.max_pairs": 2,
        "evaluation.max_prompts": 1,
        "evaluation.max_new_tokens": 4,
    }
    if FILES[name] is None:
        given["tiny.pretraining_steps"] = 2
    else:
        template = CHATML if FILES[name] == "llama3" else None
        model = save_family(tmp_path / "model", FILES[name], template=template, num_hidden_layers=5)
        given["model"] = model
    words = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    assert main(["--config", str(REPO / name), *words]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["steps"] == 2
    assert report["channels_live"]
    as_text = report["preflight"]["rendered_as_text"]
    assert ("tool calls" in as_text) is (FILES[name] == "llama3")
    if FILES[name] is not None:
        assert_own(tmp_path / "out" / "checkpoint", model)


def assert_own(checkpoint: Path, model: Path) -> None:
    """Assert that a checkpoint is its maker's, but for weights, ends of turns, and how calls are read."""
    configs = [json.loads((one / "config.json").read_text()) for one in (checkpoint, model)]
    assert configs[0] == configs[1] | {"dtype": configs[0]["dtype"]}
    ours, own = (AutoTokenizer.from_pretrained(one) for one in (checkpoint, model))
    assert ours.backend_tokenizer.to_str() == own.backend_tokenizer.to_str()
    assert ours.special_tokens_map == own.special_tokens_map
    told = [json.loads((one / "tokenizer_config.json").read_text()) for one in (checkpoint, model)]
    # Without it, `transformers serve` would give a native call as text.
    assert ("response_template" in told[0]) is (own.chat_template != CHATML)
    told[0].pop("response_template", None)
    assert told[0] == told[1]
    assert (checkpoint / "chat_template.jinja").read_bytes() == (
        model / "chat_template.jinja"
    ).read_bytes()


def test_a_guard_that_sharded_models_cannot_have_is_refused_before_anything_is_loaded(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(os.environ, "ACCELERATE_USE_FSDP", "true")
    with pytest.raises(TrainerConfigError, match="drift_weight does not support sharded models"):
        ComposerConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, drift_weight=0.5)
