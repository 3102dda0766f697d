"""Who runs where, and when to start again: what the controller decides without Monarch."""

import sys

import pytest

from trainer.__main__ import main
from trainer.engines.monarch.placement import (
    Placement,
    RestartBudget,
    latest_checkpoint,
    with_checkpoints,
)
from trainer.engines.settings_file import read_settings
from trainer.engines.trl.checkpoints import STAMP_FILE
from trainer.errors import TrainerConfigError

VALUES = {"dataset": "org/pairs", "output": "out"}


@pytest.mark.parametrize(
    ("placement", "settings", "message"),
    [
        ({}, {"outer": "object_store"}, "averages nothing"),
        ({"ranks": 0}, {}, "ranks=0 must be at least 1"),
        ({"max_restarts": -1}, {}, "max_restarts=-1"),
        ({"checkpoint_every": 0}, {}, "checkpoint_every=0"),
    ],
)
def test_a_number_out_of_range_is_refused(placement, settings, message):
    config = read_settings(VALUES | settings)
    with pytest.raises(TrainerConfigError, match=message):
        Placement(**placement).check(config)


def test_checkpoints_are_made_unless_the_settings_speak_of_them():
    ours = with_checkpoints(VALUES, Placement(checkpoint_every=7))
    assert ours["trl"] == {"save_strategy": "steps", "save_steps": 7, "save_total_limit": 2}
    own = VALUES | {"trl": {"save_steps": 3, "save_strategy": "no"}}
    assert with_checkpoints(own, Placement())["trl"]["save_strategy"] == "no"
    assert "trl" not in with_checkpoints(VALUES, Placement(max_restarts=0))


def test_a_checkpoint_that_a_rank_did_not_finish_is_passed_over(tmp_path):
    for step, name in {9: STAMP_FILE, 10: STAMP_FILE, 11: "rng_state_0.pth"}.items():
        folder = tmp_path / "steps" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / name).touch()
    assert latest_checkpoint(tmp_path) == tmp_path / "steps" / "checkpoint-10"
    assert latest_checkpoint(tmp_path / "nothing") is None


def test_progress_forgives_the_deaths_before_it(tmp_path):
    budget = RestartBudget(max_restarts=2)
    deaths = [None, None, tmp_path / "1", tmp_path / "1", tmp_path / "2", tmp_path / "2"]
    assert [budget.allows(checkpoint) for checkpoint in deaths] == [True] * 6
    assert not budget.allows(tmp_path / "2")
    assert budget.n_deaths == 7


def test_without_the_package_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "monarch", None)
    monkeypatch.setitem(sys.modules, "monarch.actor", None)
    assert main(["monarch", "--set", "output=x"]) == 2
    assert "pip install 'torchmonarch>=0.7,<0.8'" in capsys.readouterr().err
