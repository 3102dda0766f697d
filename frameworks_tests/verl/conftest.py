"""A tiny model and a dataset in the published layout."""

from pathlib import Path

import pytest

from tests.trainer.conftest import session_rows, write_dataset
from trainer.data.tiny import corpus, make_model, train_tokenizer


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("dataset") / "pairs")


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    rows = [row for session in range(8) for row in session_rows(session)]
    tokenizer = train_tokenizer(corpus(rows), vocab_size=400)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_model(tokenizer, hidden_size=32, n_layers=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
