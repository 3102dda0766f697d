"""What real models have and tiny ones lack: windows, rotary scaling, no pad token, adapters."""

import json
import os
import subprocess
import sys

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer.families import CHATML, causal_lm
from tests.trainer.published import rows_of
from trainer.__main__ import main
from trainer.data.dataset import PreferenceData
from trainer.data.rendering import Renderer
from trainer.engines.trl.run import prompts_dataset
from trainer.errors import TrainerConfigError
from trainer.model.loading import layer_range


def test_prompts_to_generate_from_have_the_datasets_tools_and_system_message(tokenizer, composer):
    rows = [
        row | {"prompt": [{"role": "system", "content": "You are careful."}, *row["prompt"]]}
        for row in rows_of(1)
    ]
    data = PreferenceData(pairs=rows)
    table = prompts_dataset(data)
    trainer = composer(render_tools=True, beta_replay=1.0, max_prompt_tokens=320)
    trainer.recorded = None
    trainer.rollout_rows = [table[i] for i in range(len(table))]
    ids, *_ = trainer._tokenize_prompts([row["prompt"] for row in trainer.rollout_rows])
    text = tokenizer.decode(ids[-1])
    assert len(ids[-1]) <= 320
    assert "You are careful." in text
    assert "Bash(command)" in text


@pytest.fixture
def folder(tokenizer, tmp_path):
    """A named model whose tokenizer has no pad token and whose template knows no tools."""
    fast = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(tmp_path / "base")
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = causal_lm(
        "llama", vocab_size=len(tokenizer), max_position_embeddings=2048, bos_token_id=None, **ends
    )
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def settings_file(tmp_path, dataset_folder, folder, **more) -> str:
    values = {
        "dataset": str(dataset_folder),
        "output": str(tmp_path / "out"),
        "model": str(folder),
        "evaluation": {"max_pairs": 4, "max_prompts": 1, "max_new_tokens": 4},
        "trl": {
            "beta_replay": 1.0,
            "policy_weight": 0.1,
            "max_steps": 2,
            "learning_rate": "1e-2",
            "per_device_train_batch_size": 2,
            "pairs_per_step": 2,
            "max_prompt_tokens": 900,
            "max_response_tokens": 64,
            "max_completion_length": 64,
            "activation_checkpointing": False,
        },
    } | more
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(values).replace("'1e-2'", "1e-2"), "utf-8")
    return str(path)


@pytest.mark.parametrize("peft", [None, {"rank": 4, "alpha": 8, "layers": "1-1"}])
@pytest.mark.slow
def test_a_named_model_is_trained_in_full_or_by_adapters_and_loads_anywhere(
    tmp_path, dataset_folder, folder, peft, capsys
):
    path = settings_file(tmp_path, dataset_folder, folder, peft=peft)
    assert main(["--config", path]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["preflight"]["n_identical_sides"] == 0
    assert set(report["preflight"]["rendered_as_text"]) >= {"tool calls", "tool results"}
    assert report["pairs_forward"] == "packed"
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint")
    before = AutoModelForCausalLM.from_pretrained(folder)
    differ = {
        name
        for name, value in trained.state_dict().items()
        if not torch.equal(value, before.state_dict()[name])
    }
    assert differ
    assert (tmp_path / "out" / "adapter" / "adapter_config.json").exists() == (peft is not None)
    if peft is not None:
        assert all(".layers.1." in name for name in differ)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "checkpoint")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "can't show lists of tools, tool calls, tool results: it was trained" in " ".join(
        card.split()
    )
    assert Renderer(tokenizer=tokenizer).features.has_tool_calls is False


def test_what_cannot_work_is_refused_before_the_weights_are_there(
    tmp_path, dataset_folder, folder, capsys
):
    (folder / "model.safetensors").unlink()
    path = settings_file(tmp_path, dataset_folder, folder)
    given = ["--config", str(path), "--check"]
    assert main(given) == 0
    for setting, message in (
        ("preflight.plain_rendering=false", "can't show lists of tools, tool calls"),
        ("trl.max_prompt_tokens=4000", "has 2048 positions"),
        (f"model={tmp_path}/nothing", "no tokenizer there"),
    ):
        assert main([*given, "--set", setting]) == 2
        assert message in capsys.readouterr().err


def test_a_range_of_layers_is_read():
    assert layer_range("2-4", 6) == [2, 3, 4]
    assert layer_range("last 2", 6) == [4, 5]
    assert layer_range("last 60%", 30) == list(range(12, 30))
    assert layer_range("last 60%", 2) == [1]
    assert layer_range(None, 6) is None
    for wrong in ("4-2", "2-6", "last 7", "last 0"):
        with pytest.raises(TrainerConfigError, match="the model has the layers 0-5"):
            layer_range(wrong, 6)
    with pytest.raises(TrainerConfigError, match="write first-last"):
        layer_range("2", 6)


@pytest.mark.slow
def test_a_trained_model_is_pushed_whole_and_private_to_a_hub(tmp_path):
    from tests.support.forked import forked
    from tests.support.hub import HubServer

    (tmp_path / "checkpoint").mkdir()
    for name in (
        "README.md",
        "report.json",
        "checkpoint/config.json",
        "checkpoint/model.safetensors",
    ):
        (tmp_path / name).write_text(f"{name} of a model", "utf-8")
    (tmp_path / "metrics.jsonl").write_text("stays here", "utf-8")
    code = (
        "import sys; from pathlib import Path; from trainer.engines.trl.run import push_to_hub;"
        "push_to_hub('me/model', Path(sys.argv[1]))"
    )
    with HubServer(tmp_path / "hub") as hub:
        environment = {**os.environ, **hub.environment()}
        done = subprocess.run(
            forked([sys.executable, "-c", code, str(tmp_path)], "libraries"),
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        repository = hub.repository("me/model")
    assert repository["private"]
    names = {"README.md", "report.json", "config.json", "model.safetensors"}
    assert set(repository["files"]) - {".gitattributes"} == names
