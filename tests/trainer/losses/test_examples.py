"""The examples in the docstrings of the public losses."""

import doctest
import importlib
import types

import pytest
import torch
from torch import nn

import trainer.losses

SHOWN = [name for name in trainer.losses.__all__ if name != "LossComponents"]


def examples_of(name: str) -> list[doctest.DocTest]:
    home = importlib.import_module(getattr(trainer.losses, name).__module__)
    names = {**vars(home), "torch": torch, "nn": nn, "types": types}
    found = doctest.DocTestFinder(recurse=False).find(
        getattr(trainer.losses, name), name, home, globs=names
    )
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", SHOWN)
def test_every_public_loss_shows_an_example_and_it_runs(name):
    tests = examples_of(name)
    assert tests, f"{name} shows no example"
    said: list[str] = []
    for test in tests:
        result = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
        assert result.failed == 0, "".join(said)
