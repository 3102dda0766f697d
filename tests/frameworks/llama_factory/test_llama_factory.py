"""LLaMA-Factory, real and unmodified on the CPU, with the configuration of its recipe."""

import json
from pathlib import Path

import pytest
import yaml
from datasets import load_from_disk
from transformers import AutoTokenizer

RECIPE = Path(__file__).parents[3] / "recipes" / "llama_factory" / "dpo.yaml"
NO_AUDIO = Path(__file__).parent / "no_audio"


@pytest.fixture(scope="module")
def trained(sessions, run, tmp_path_factory):
    """Folder of a training of two steps, of a tiny model as a whole."""
    folder = tmp_path_factory.mktemp("llama_factory")
    config = yaml.safe_load(RECIPE.read_text("utf-8"))
    for key in [key for key in config if key.startswith("lora_")]:
        del config[key]
    config |= {
        "model_name_or_path": str(sessions / "model"),
        "dataset_dir": str(sessions / "exports" / "llama-factory"),
        "output_dir": str(folder / "out"),
        "tokenized_path": str(folder / "tokenized"),
        "cutoff_len": 4096,
        "max_steps": 2,
        "finetuning_type": "full",
        "bf16": False,
        "use_cpu": True,
        "gradient_accumulation_steps": 1,
        "logging_steps": 1,
        "preprocessing_num_workers": 1,
    }
    (folder / "dpo.yaml").write_text(yaml.safe_dump(config), "utf-8")
    run("llamafactory-cli", "train", folder / "dpo.yaml", PYTHONPATH=NO_AUDIO)
    return folder


def test_two_steps_are_taken(trained):
    state = json.loads((trained / "out" / "trainer_state.json").read_text("utf-8"))
    assert state["global_step"] == 2
    assert all(entry["loss"] > 0 for entry in state["log_history"] if "loss" in entry)


def test_every_row_arrives_whole_with_both_of_its_sides(trained, sessions, rows_of):
    rows = rows_of("llama-factory")
    tokenized = load_from_disk(str(trained / "tokenized"))["train"]
    tokenizer = AutoTokenizer.from_pretrained(sessions / "model")
    assert len(tokenized) == len(rows)
    for row, seen in zip(rows, tokenized, strict=True):
        for side in ("chosen", "rejected"):
            text = tokenizer.decode(seen[f"{side}_input_ids"])
            labels = [label for label in seen[f"{side}_labels"] if label >= 0]
            for turn in (row["conversations"][1], row["conversations"][-1]):
                assert turn["value"] in text
            spoken = tokenizer.decode(labels)
            value = row[side]["value"]
            if row[side]["from"] == "function_call":
                (function,) = json.loads(value)
                assert "<tool_call>" in spoken
                assert json.dumps(function["arguments"], ensure_ascii=False) in spoken
            else:
                assert value in spoken
            assert spoken.rstrip().endswith("<|im_end|>")
