"""Errors form one tree per house and cross process boundaries."""

import builtins
import pickle

import pytest

import replay_pipeline.errors
import trainer.errors

ROOTS = [
    (replay_pipeline.errors, replay_pipeline.errors.ReplayPipelineError),
    (trainer.errors, trainer.errors.TrainerError),
]


def errors_of(module):
    kinds = [each for each in vars(module).values() if isinstance(each, type)]
    assert len(kinds) > 8
    return [each for each in kinds if each.__module__ == module.__name__]


@pytest.mark.parametrize(("module", "root"), ROOTS)
def test_every_error_has_the_root_and_pickles(module, root):
    for kind in errors_of(module):
        assert issubclass(kind, root)
        copy = pickle.loads(pickle.dumps(kind("why")))
        assert type(copy) is kind
        assert str(copy) == "why" or issubclass(kind, OSError)


@pytest.mark.parametrize(("module", "root"), ROOTS)
def test_leaf_errors_refine_a_standard_exception(module, root):
    for kind in errors_of(module):
        standard = [k for k in kind.__mro__ if vars(builtins).get(k.__name__) is k]
        assert Exception in standard
