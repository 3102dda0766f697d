"""The examples in docstrings run as they are printed."""

import doctest
from importlib import import_module

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "ingesters.traces",
        "judge.extract",
        "normalize.normalizer",
        "replay.ask.control",
        "replay.ask.run",
        "replay.dialects.wellformed",
        "stages.pipeline",
    ],
)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = import_module(f"replay_pipeline.{name}")
    failed, attempted = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert failed == 0
    assert attempted > 0
