"""Dagster's home as we write it, and as `doctor` finds one that others have written."""

import pytest

from replay_pipeline.orchestration.instance import prepare_home
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
