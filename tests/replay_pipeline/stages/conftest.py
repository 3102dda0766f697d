from pathlib import Path

import pytest

from tests.roots import project_root, run_batches


@pytest.fixture(autouse=True, scope="module")
def _unread_by_datasets(unread_by_datasets: None) -> None:
    """Only the root that the tests share is read as users read it."""


@pytest.fixture(scope="session")
def published(tmp_path_factory) -> Path:
    """The sample's data root after every batch stage and the publication; copy it to change it."""
    root = tmp_path_factory.mktemp("published") / "data"
    work = project_root(root)
    run_batches(work)
    work.publish()
    return root
