"""The real package: meshes of real processes around the TRL run, and what a death costs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.one_file import first_replay_loss, settings_values


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "checkpoint" / "model.safetensors")


def assert_same_weights(first: Path, second: Path) -> None:
    expected = weights(second)
    for name, value in weights(first).items():
        assert torch.equal(value, expected[name]), name


def steps(output: Path) -> list[dict]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "policy/loss" in line]


def test_the_same_settings_file_gives_the_same_model_with_and_without_a_mesh(command, tmp_path):
    plain = command("trl", tmp_path / "plain")
    hosted = command("monarch", tmp_path / "hosted")
    assert (plain.code, hosted.code) == (0, 0), hosted.errors
    assert_same_weights(tmp_path / "hosted", tmp_path / "plain")
    report = hosted.report["report"]
    assert report["loss_last"] == plain.report["loss_last"]
    assert report["channels_live"] == ["policy", "sdpo", "replay"]
    assert hosted.report["restarts"] == []


def test_the_file_that_drives_trl_and_verl_drives_the_mesh(command, tmp_path, dataset, model):
    values = settings_values(dataset=dataset, output=tmp_path / "out", model=model)
    file = tmp_path / "one.yaml"
    file.write_text(json.dumps(values))
    done = command("monarch", tmp_path / "out", file=file)
    assert done.code == 0, done.errors
    report = done.report["report"]
    assert (report["channels_live"], report["channels_off"]) == (["policy", "sdpo", "replay"], {})
    assert [line["step"] for line in steps(tmp_path / "out")] == [1, 2, 3]
    first = steps(tmp_path / "out")[0]["replay/loss"]
    assert first == pytest.approx(first_replay_loss(values), rel=1e-5)


def test_a_killed_rank_is_started_anew_and_the_run_ends_the_same(command, tmp_path):
    ranks = ("engines.monarch.ranks=2", "engines.monarch.checkpoint_every=1")
    whole = command("monarch", tmp_path / "whole", *ranks)
    killed = command(
        "monarch",
        tmp_path / "killed",
        *ranks,
        "reward=hosted_rewards:deadly",
        DEADLY_MARK=str(tmp_path / "mark"),
        DEADLY_AFTER="9",
        DEADLY_RANK="1",
    )
    assert (whole.code, killed.code) == (0, 0), killed.errors
    assert (tmp_path / "mark").exists()
    (restart,) = killed.report["restarts"]
    assert restart["resumed_from"].endswith("checkpoint-2")
    assert "Killed(sig=9)" in restart["cause"]
    assert_same_weights(tmp_path / "killed", tmp_path / "whole")
    numbers = [
        [{k: v for k, v in line.items() if "time" not in k} for line in steps(tmp_path / name)]
        for name in ("killed", "whole")
    ]
    assert numbers[0] == numbers[1]
    assert [line["step"] for line in numbers[0]] == [1, 2, 3, 4]


def test_a_run_that_dies_too_often_ends(command, tmp_path):
    doomed = command(
        "monarch",
        tmp_path / "doomed",
        "reward=hosted_rewards:always_deadly",
        "engines.monarch.max_restarts=0",
    )
    assert doomed.code == 2
    assert "the run died 1 times" in doomed.errors
