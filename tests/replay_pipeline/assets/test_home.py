"""Dagster's home as we write it."""

import os
import subprocess
import sys
from pathlib import Path

import replay_pipeline
from replay_pipeline.assets.instance import ui_command
from replay_pipeline.settings import Settings


def test_dagster_finds_our_code_where_only_the_search_path_names_it(tmp_path, monkeypatch):
    package = Path(replay_pipeline.__path__[0])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), str(tmp_path)]))
    _, environment = ui_command(Settings(data_dir=tmp_path / "data"), port=1)
    load = (
        "from dagster._core.code_pointer import load_python_module as load; print(load({!r}, {!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", load.format("replay_pipeline.assets.definitions", str(tmp_path))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert str(package / "assets/definitions.py") in done.stdout, done.stderr
