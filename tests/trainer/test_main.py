"""`replay-train` on a published dataset, from configuration to report."""

import json
import math

import pytest
from safetensors import safe_open

from replay_pipeline.stages.pages.training import sentences_of
from tests.trainer.programs import SMALL, words_of
from trainer.__main__ import main, read_config, report_words
from trainer.errors import TrainerConfigError

pytestmark = pytest.mark.slow

ALL_CHANNELS = ("trl.objective=dapo", "trl.alpha_sdpo=0.1")
"""Beside the third, which is on by default; the first imitates by default, and reads no rollouts."""


@pytest.fixture(scope="module")
def finished(dataset_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "model"
    settings = [f"dataset={dataset_folder}", f"output={output}", "trl.max_steps=6", *ALL_CHANNELS]
    settings += [*SMALL, "evaluation.max_prompts=2", "evaluation.max_new_tokens=8"]
    assert main(words_of(*settings)) == 0
    return output


def test_a_terminal_is_told_of_a_run_in_sentences(finished):
    report = json.loads((finished / "report.json").read_text())
    told = report_words({**report, "findings": ["it acts worse"]}, {"output": "model"}).split("\n")
    assert told[0].startswith("6 steps: the loss went from ")
    assert any(line.startswith("Takes the consensus action: ") for line in told)
    assert told[-2] == "It acts worse."
    assert told[-1].startswith("Next: look into model: ")
    assert report_words({"replicas": 2}, {}) == '{"replicas": 2}'


def test_three_channels_are_live_and_the_objective_falls(finished):
    report = json.loads((finished / "report.json").read_text())
    assert report["channels_live"] == ["policy", "sdpo", "replay"]
    assert report["channels_off"] == {}
    assert report["loss_last"] < report["loss_first"]
    assert report["steps"] == 6
    assert report["seconds"] > 0


def test_metrics_are_json_lines_with_group_and_name(finished):
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows[:6]] == [1, 2, 3, 4, 5, 6]
    assert all("/" in key for row in rows for key in row if key != "step")
    keys = {"train/loss", "policy/loss", "replay/loss", "replay/accuracy", "train/reward"}
    assert keys <= set(rows[0])
    assert any("sdpo/loss" in row for row in rows)


def test_the_run_leaves_plot_card_evaluation_and_a_safe_checkpoint(finished):
    assert (finished / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "| held-out preference accuracy |" in (finished / "README.md").read_text()
    evaluation = json.loads((finished / "evaluation.json").read_text())
    for moment in ("before", "after"):
        assert math.isfinite(evaluation[moment]["preference"]["margin"])
        assert evaluation[moment]["blank_prompt"]["n_pairs"] == 12
        assert evaluation[moment]["consensus"]["n"] == 2
    seen = json.loads((finished / "inspected.json").read_text())
    assert len(seen) == 3
    assert all(row["chosen (scored)"]["n_tokens"] > 0 for row in seen)
    assert all(len(row["parts"]) == 3 for row in seen)
    with safe_open(finished / "checkpoint" / "model.safetensors", framework="pt") as tensors:
        assert any("embed_tokens" in name for name in tensors.keys())  # noqa: SIM118
    assert (finished / "checkpoint" / "tokenizer.json").exists()
    assert not list(finished.rglob("*.bin"))


def test_what_was_not_scored_has_no_figure(dataset_folder, tmp_path, capsys):
    """No share of no pairs stands in the report, the card, the sentences or the page."""
    output = tmp_path / "model"
    settings = [f"dataset={dataset_folder}", f"output={output}", "trl.max_steps=1"]
    settings += [*SMALL, "tiny.pretraining_steps=1"]
    settings += ["evaluation.max_pairs=0", "evaluation.max_prompts=0"]
    assert main(words_of(*settings)) == 0
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert report["held_out_pairs"] == report["held_out_states"] == 0
    assert report["intervals_after"] == {}
    figures = {name for name in report if name.endswith(("_before", "_after"))}
    assert figures == {"general_loss_before", "general_loss_after", "intervals_after"}
    for name in ("report.json", "evaluation.json"):
        json.loads((output / name).read_text(), parse_constant=pytest.fail)
    card = (output / "README.md").read_text()
    assert "It was not scored on held-out pairs. It acted at 0 held-out states." in card
    assert [line for line in card.splitlines() if line.startswith("| ")][1:] == [
        f"| loss on general text | {report['general_loss_before']:.3f} "
        f"| {report['general_loss_after']:.3f} |"
    ]
    assert len(report_words(report, {}).splitlines()) == 1
    assert len(sentences_of(report)) == 1


def test_overrides_reach_into_sections(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("trl: {max_steps: 3}\n")
    values = read_config(path, ["trl.max_steps=5", "tiny.vocab_size=300", "model=null"])
    assert values == {"trl": {"max_steps": 5}, "tiny": {"vocab_size": 300}, "model": None}
    with pytest.raises(TrainerConfigError, match="expected key=value"):
        read_config(path, ["oops"])


@pytest.mark.slow
def test_rollouts_may_be_generated(dataset_folder, tmp_path):
    output = tmp_path / "model"
    settings = [
        f"dataset={dataset_folder}",
        f"output={output}",
        "rollouts=generate",
        "trl.max_steps=2",
        "trl.max_completion_length=16",
        *SMALL,
        "tiny.pretraining_steps=2",
        "evaluation.max_prompts=0",
        "trl.save_strategy=steps",
        "trl.save_steps=1",
        *ALL_CHANNELS,
    ]
    assert main(words_of(*settings)) == 0
    report = json.loads((output / "report.json").read_text())
    assert {"sdpo", "replay"} <= set(report["channels_live"])
    assert main(words_of(*settings, f"resume_from={output}/steps/checkpoint-1")) == 0
    assert json.loads((output / "report.json").read_text())["steps"] == 2
