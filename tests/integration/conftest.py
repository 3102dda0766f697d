from collections.abc import Iterator

import pytest

from replay_pipeline.stages.audit import AuditResult, dataset
from replay_pipeline.storage.store import Place


@pytest.fixture(autouse=True, scope="module")
def _unread_by_datasets() -> Iterator[None]:
    """What `datasets` reads is told in `publish/test_loading.py` and by the demo: it is half of a publication."""

    def loaded(_: Place) -> AuditResult:
        """Hold."""
        return AuditResult(judged=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "BLOCKING", {**dataset.BLOCKING, "dataset_loads": loaded})
        yield
