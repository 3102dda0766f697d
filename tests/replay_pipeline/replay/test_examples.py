"""The examples in the docstrings of the public functions run as they are printed."""

import doctest
from importlib import import_module

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replay.ask.run", "stages.pipeline"])
def test_examples_of_functions_that_ask_teachers(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, attempted = doctest.testmod(import_module(f"replay_pipeline.{name}"))
    assert failed == 0
    assert attempted >= 4


@pytest.mark.parametrize("name", ["replay.ask.control", "replay.dialects.wellformed"])
def test_examples_of_small_functions(name):
    module = import_module(f"replay_pipeline.{name}")
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS) == (0, 1)
