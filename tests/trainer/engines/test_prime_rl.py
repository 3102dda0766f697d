"""What PRIME-RL is handed, on a machine without it; with it, `tests/frameworks/prime_rl`."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from trainer.__main__ import main
from trainer.engines.handover import TokenizedPairs
from trainer.engines.prime_rl import register


@pytest.mark.parametrize("program", [register.main, register.launch])
def test_without_prime_rl_its_programs_say_how_to_get_it(program, capsys):
    assert program() == 2
    assert "PRIME-RL is not installed" in capsys.readouterr().err


def settings_file(folder: Path, dataset: Path, model: Path, **trl: Any) -> Path:
    shared = {
        "objective": "grpo",
        "alpha_sdpo": 0.1,
        "sdpo_estimator": "sampled",
        "jsd_beta": 1.0,
        "beta_replay": 0.05,
        "dpo_variant": "dpo",
        "max_steps": 7,
        "num_generations": 4,
    }
    values = {
        "dataset": str(dataset),
        "output": str(folder / "out"),
        "model": str(model),
        "rollouts": "generate",
        "trl": shared | trl,
        "engines": {"prime_rl": {"orchestrator.max_off_policy_steps": 0}},
    }
    path = folder / "settings.yaml"
    path.write_text(json.dumps(values))
    return path


def test_settings_file_becomes_toml_and_pairs(dataset_folder, saved, tmp_path, capsys):
    path = settings_file(tmp_path, dataset_folder, saved)
    assert main(["prime_rl", "--config", str(path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["states"], report["hints"], report["pairs"]) == (20, 10, 20)
    config = tomllib.loads(Path(report["config"]).read_text())
    assert config["max_steps"] == 7
    assert config["orchestrator"]["max_off_policy_steps"] == 0
    assert config["orchestrator"]["algo"]["groups_per_step"] == 2
    source = config["orchestrator"]["train"]["source"][0]
    assert source["env"]["taskset"]["dataset"] == str(dataset_folder)
    # Eight rollouts and both sides of four pairs.
    assert config["orchestrator"]["batch_size"] == 2 * 4 + 2 * 4
    assert len(TokenizedPairs(config["orchestrator"]["algo"]["pairs"])) == 20


@pytest.mark.parametrize(
    ("trl", "message"),
    [
        ({"num_generations": 3}, "is not a multiple of"),
        ({"max_steps": -1}, "set trl.max_steps"),
        ({"pairs_per_step": 3}, "make twice pairs_per_step a multiple"),
    ],
)
def test_what_prime_rl_cannot_do_is_refused(trl, message, dataset_folder, saved, tmp_path, capsys):
    path = settings_file(tmp_path, dataset_folder, saved, **trl)
    assert main(["prime_rl", "--config", str(path)]) == 2
    assert message in capsys.readouterr().err
