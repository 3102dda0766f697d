"""The examples in the docstrings of the public functions run as they stand."""

import doctest
import inspect

import pytest

import replay_pipeline

OURS = ["ClaudeCodeIngester", "DJNormalizer", "extract_dpo_pairs", "open_traces"]


@pytest.mark.parametrize("name", OURS)
def test_a_public_function_shows_an_example_that_runs(name):
    public = getattr(replay_pipeline, name)
    module = inspect.getmodule(public)
    examples = doctest.DocTestFinder(recurse=False).find(public, name, globs=vars(module).copy())
    assert sum(len(found.examples) for found in examples) > 0
    runner = doctest.DocTestRunner()
    for found in examples:
        runner.run(found)
    assert runner.summarize(verbose=False).failed == 0
