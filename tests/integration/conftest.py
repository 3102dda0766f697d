import pytest


@pytest.fixture(autouse=True, scope="module")
def _unread_by_datasets(unread_by_datasets: None) -> None:
    """The demo's dataset is read as users read it, in a process of its own."""
