"""`replay-train` runs the trainer of this package, whatever else is called `trainer`."""

import subprocess
import sys
from pathlib import Path

import pytest

from replay_pipeline.stages.work import replay_train

SCRIPT = Path(sys.executable).with_name("replay-train")


def run(folder, *words, **variables):
    return subprocess.run(
        [SCRIPT, *words], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


def test_a_trainer_in_the_current_folder_is_not_read(tmp_path):
    (tmp_path / "trainer.py").write_text("open('ran', 'w')")
    (tmp_path / "argparse.py").write_text("open('ran', 'w')")
    told = run(tmp_path, "--help", PYTHONPATH=str(tmp_path))
    assert told.stdout.startswith("usage: replay-train "), told.stderr
    assert not (tmp_path / "ran").exists()


def test_a_trainer_of_another_place_is_named(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "trainer.py").write_text("open('ran', 'w')")
    told = run(tmp_path, "--help", PYTHONPATH=str(tmp_path / "other"))
    assert told.returncode == 2
    assert f"`trainer` is {tmp_path}/other/trainer.py" in told.stderr
    assert not (tmp_path / "ran").exists()


def test_a_trainer_that_was_written_over_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("")
    monkeypatch.setattr(replay_train, "HOME", tmp_path)
    monkeypatch.setattr(
        replay_train.importlib.util,
        "find_spec",
        lambda _: type("Spec", (), {"origin": str(tmp_path / "trainer" / "__init__.py")}),
    )
    monkeypatch.setattr(
        replay_train, "packages_distributions", lambda: {"trainer": ["replay-pipeline", "trainers"]}
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert replay_train.main() == 2
    assert "is not ours any more: trainers has written over it" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["script", "module"])
def test_a_wrong_setting_ends_with_a_sentence(tmp_path, how):
    command = [SCRIPT] if how == "script" else [sys.executable, "-m", "trainer"]
    done = subprocess.run(
        [*command, "--config", "none.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "none.yaml" in done.stderr
