"""axolotl, real and unmodified on the CPU, with the configuration of its recipe."""

import json
from pathlib import Path

import pytest
import yaml
from datasets import load_from_disk

RECIPE = Path(__file__).parents[3] / "recipes" / "axolotl" / "dpo.yaml"


@pytest.fixture(scope="module")
def trained(sessions, run, tmp_path_factory):
    """Folder of a training of two steps, of a tiny model as a whole."""
    folder = tmp_path_factory.mktemp("axolotl")
    config = yaml.safe_load(RECIPE.read_text("utf-8"))
    for key in [key for key in config if key.startswith(("adapter", "lora_"))]:
        del config[key]
    config["datasets"][0]["path"] = str(sessions / "exports" / "axolotl" / "train.jsonl")
    config |= {
        "base_model": str(sessions / "model"),
        "output_dir": str(folder / "out"),
        "dataset_prepared_path": str(folder / "prepared"),
        "sequence_len": 4096,
        "max_steps": 2,
        "bf16": False,
        "use_cpu": True,
        "gradient_accumulation_steps": 1,
        "logging_steps": 1,
        "dataset_num_proc": 1,
    }
    (folder / "dpo.yaml").write_text(yaml.safe_dump(config), "utf-8")
    run("axolotl", "train", folder / "dpo.yaml", "--launcher", "python")
    return folder


def test_two_steps_are_taken(trained):
    state = json.loads((trained / "out" / "checkpoint-2" / "trainer_state.json").read_text("utf-8"))
    assert state["global_step"] == 2
    assert all(entry["loss"] > 0 for entry in state["log_history"] if "loss" in entry)


def test_every_row_arrives_with_both_of_its_sides(trained, rows_of):
    rows = rows_of("axolotl")
    (folder,) = [path for path in (trained / "prepared").iterdir() if path.is_dir()]
    prepared = load_from_disk(str(folder))
    assert len(prepared) == len(rows)
    by_state = {row["state_id"]: row for row in prepared}
    for row in rows:
        seen = by_state[row["state_id"]]
        for side in ("chosen", "rejected"):
            assert seen[side].startswith(row[side][0]["content"])
            assert seen[side].endswith("<|im_end|>")
        assert all(message["content"] in seen["prompt"] for message in row["messages"])
