"""Data roots on the bundled sample, and what is done to them again and again."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from replay_pipeline.settings import Settings
from replay_pipeline.stages import chain
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.stage import Stage, Task
from replay_pipeline.storage.store import as_path
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.support.settings_files import write_settings
from tests.support.teachers import TeacherServer

PROJECT = SESSIONS_DIR / "-home-mira-code-tideline"
"""Five of the sample's 23 logs: enough where what counts is not what is in them."""


def pipeline_at(root: Path, **changes: Any) -> Pipeline:
    """The pipeline as the settings file of a data root has it, with `changes` of its sections."""
    return Pipeline(Settings.load(data_dir=root, changes=changes))


def project_root(root: Path, **replay: Any) -> Pipeline:
    """A data root on one project of the sample, in two batches; nothing is ingested yet."""
    return sample_root(root, n_batch_sessions=3, sessions=PROJECT, **replay)


def sample_root(
    root: Path, *, n_batch_sessions: int = 8, sessions: Path = SESSIONS_DIR, **replay: Any
) -> Pipeline:
    """A data root whose settings name the sample and its teachers; nothing is ingested yet."""
    write_settings(
        root,
        ingest={
            "sources": [sessions],
            "max_batch_sessions": n_batch_sessions,
            "settle_s": 0,
        },
        replay={"sample_teachers": True} | replay,
    )
    return pipeline_at(root)


def settings_at(place: str | Path, home: Path) -> Settings:
    """Settings of that project for a data root on any store, whatever the environment says."""
    changes = {
        "home_dir": home,
        "ingest": {"sources": [PROJECT]},
        "replay": {"sample_teachers": True, "ask_at": "steps"},
    }
    return Settings.load(data_dir=as_path(place), changes=changes, env={})


def served_root(root: Path, server: TeacherServer, *, sessions: Path = SESSIONS_DIR) -> Pipeline:
    """A data root on the sample's sessions, with the default teachers at a server of one's own."""
    write_settings(root, ingest={"sources": [sessions]}, replay={"teachers": server.teachers()})
    return pipeline_at(root)


def with_work(monkeypatch: pytest.MonkeyPatch, name: str, around: Callable[..., Any]) -> None:
    """Have a stage of the chain worked by `around`, which is given its own work and the task."""

    def changed(stage: Stage) -> Stage:
        def work(task: Task, **options: Any) -> Any:
            return around(partial(stage.work, **options), task)

        return replace(stage, work=work) if stage.name == name else stage

    monkeypatch.setattr(chain, "STAGES", [*map(changed, chain.STAGES)])


def run_batches(work: Pipeline) -> None:
    """Ingest what is new, and take every batch of it through the stages that a batch has."""
    for batch in work.ingest_new():
        for stage in (work.replay, work.pairs, work.normalize):
            stage(batch)
