"""Real pretrained weights under `python -m trainer`: `make test-real` fetches them first."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def served(model: str) -> Iterator[str]:
    """Address of a real model behind `python -m trainer serve`."""
    command = [sys.executable, "-m", "trainer", "serve", "--model", str(FOLDER / model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["base_url"]
        finally:
            server.terminate()


def test_smollm2_follows_itself_at_a_server_and_gemma_in_a_folder(dataset, tmp_path):
    """Two teachers, two tokenizers, one of them over HTTP: what both find likely becomes likelier."""
    with served(MODELS[0]) as url:
        teachers = [
            {"model": str(FOLDER / MODELS[0]), "name": "smollm2", "url": url, "accuracy": 0.25},
            {"model": str(FOLDER / MODELS[1]), "name": "gemma", "accuracy": 0.75},
        ]
        more = ["trl.replay=distill", "trl.jsd_beta=0.0", "trl.max_steps=4", "trl.drift_weight=0"]
        more += ["trl.per_device_train_batch_size=4", f"teachers={json.dumps(teachers)}"]
        more += ["evaluation.max_prompts=1", "evaluation.max_new_tokens=8"]
        done = train(MODELS[0], dataset, tmp_path, *(w for m in more for w in ("--set", m)))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["channels_live"] == ["replay"]
    assert report["loss_last"] < 0.9 * report["loss_first"]
    own, other = report["teachers"]
    assert (own["weight"], own["has_trainees_tokenizer"]) == (0.25, True)
    assert own["aligned"] == own["tokens"]
    assert (other["name"], other["has_trainees_tokenizer"]) == ("gemma", False)
    assert other["aligned"] > 0.5 * other["tokens"]
    assert other["aligned"] + other["in_spans"] == other["tokens"]
