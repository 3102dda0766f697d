"""Real pretrained weights under `replay-train`: `make test-real` fetches them first."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer.published import write_dataset

# Two quiet cores take minutes for a model, and a busy machine several times that.
pytestmark = pytest.mark.timeout(3_600)

REPO = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("REAL_MODELS", REPO / "build" / "real-model"))
MODELS = ("smollm2-135m-instruct", "gemma-3-270m")
FULL = ("--set", "peft=null", "--set", "trl.learning_rate=2e-5")
SHORT = ("trl.max_steps=20", "trl.max_prompt_tokens=64", "evaluation.max_pairs=2")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("published"))


def train(model: str, dataset: Path, output: Path, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "trainer"]
    for setting in (f"model={FOLDER / model}", f"dataset={dataset}", f"output={output}", *SHORT):
        command += ["--set", setting]
    return subprocess.run([*command, *more], capture_output=True, text=True, cwd=REPO)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", ["full", "adapters"])
def test_a_real_model_learns_in_20_steps_and_loads_in_plain_transformers(
    model, how, dataset, tmp_path
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = train(model, dataset, tmp_path, *(FULL if how == "full" else ()))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["steps"] == 20
    assert report["preflight"]["n_identical_sides"] == 0
    assert report["channels_live"] == ["replay"]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["replay/loss"] for row in rows if "replay/loss" in row]
    assert sum(losses[-5:]) < sum(losses[:5])
    assert report["loss_last"] < report["loss_first"]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Go on."}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    assert trained.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > ids.shape[1]


def test_stock_smollm2_is_refused_where_text_for_tools_is_forbidden(dataset, tmp_path):
    done = train(MODELS[0], dataset, tmp_path, "--set", "preflight.plain_rendering=false")
    assert done.returncode == 2
    assert "can't show tool calls, tool results" in done.stderr
    assert not (tmp_path / "checkpoint").exists()


def test_the_recipe_for_a_tiny_model_holds_for_a_real_one():
    command = [sys.executable, "recipes/quickstart/run.py", "--real", str(FOLDER / MODELS[0])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "PASS" in done.stdout
