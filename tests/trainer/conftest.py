"""A small published dataset in the layout of the Hub, and a tiny model and tokenizer for it."""

import os
from pathlib import Path

import pytest
import torch

from tests.trainer.published import rows_of, write_dataset

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def dataset_folder(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="session")
def tokenizer():
    from trainer.data.tiny import corpus, train_tokenizer

    return train_tokenizer(corpus(rows_of(8)), vocab_size=512)


@pytest.fixture
def model(tokenizer):
    from trainer.data.tiny import make_model

    return make_model(tokenizer, hidden_size=32, n_layers=2, n_heads=2, seed=1)


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    """A folder with a tiny model and its tokenizer."""
    from tests.trainer.training import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny"), rows_of(8), n_layers=1)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def composer(tmp_path, model, tokenizer):
    """A function that builds a trainer; settings are fields of `ComposerConfig`."""
    from tests.trainer.training import make_trainer
    from trainer.engines.trl.run import without_upstream_warnings

    with without_upstream_warnings():
        yield lambda **settings: make_trainer(
            settings.pop("output", tmp_path), settings.pop("model", model), tokenizer, **settings
        )
