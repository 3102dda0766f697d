"""Dagster's home as we write it, and as `doctor` finds one that others have written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import replay_pipeline
from replay_pipeline.assets.instance import prepare_home, ui_command
from replay_pipeline.settings import Settings
from replay_pipeline.stages.views.doctor import examine


def finding(tmp_path) -> dict:
    found = [
        f for f in examine(Settings(data_dir=tmp_path / "data"), []) if f["what"] == "dagster home"
    ]
    return found[0] if found else {}


def test_doctor_is_content_with_our_own_home_and_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    assert finding(tmp_path) == {}
    monkeypatch.setenv("DAGSTER_HOME", str(prepare_home(tmp_path)))
    assert finding(tmp_path)["ok"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, ["pools", "run_monitoring"]),
        ("telemetry: {enabled: false}", ["pools", "run_monitoring"]),
        ("concurrency: {pools: {default_limit: 1}}", ["run_monitoring"]),
        ("run_monitoring: {enabled: true, free_slots_after_run_end_seconds: 10}", ["pools"]),
        (
            "concurrency: {pools: {default_limit: 1}}\n"
            "run_monitoring: {enabled: false, free_slots_after_run_end_seconds: 10}",
            ["enabled: true"],
        ),
        ("[", ["cannot be read"]),
    ],
)
def test_doctor_names_what_a_home_of_plain_dagster_lacks(tmp_path, monkeypatch, text, named):
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    if text is not None:
        (tmp_path / "dagster.yaml").write_text(text)
    found = finding(tmp_path)
    assert not found["ok"]
    for word in named:
        assert word in found["detail"]


def test_dagster_finds_our_code_where_only_the_search_path_names_it(tmp_path, monkeypatch):
    package = Path(replay_pipeline.__path__[0])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), str(tmp_path)]))
    _, environment = ui_command(Settings(data_dir=tmp_path / "data"), port=1)
    load = (
        "from dagster._core.code_pointer import load_python_module as load; print(load({!r}, {!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", load.format("replay_pipeline.definitions", str(tmp_path))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert str(package / "definitions.py") in done.stdout, done.stderr
