"""What every test stands on: no hub, no telemetry, and settings of its own."""

import gc
import os
import signal
import tempfile
import uuid
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.forked import forked_python

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    TRL_EXPERIMENTAL_SILENCE="1",
)
# The scanner's compiled rules, for processes with a home folder of their own: two seconds each.
os.environ.setdefault("KF_RULE_CACHE_DIR", str(Path.home() / ".cache" / "kingfisher"))

# A shell starts background jobs deaf to Ctrl-C, and so would be all programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Load the tests, and let no collection of garbage look through what they have loaded."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the file that takes longest: the last by name, it would be waited for alone."""
    items.sort(key=lambda item: item.path.name != "test_docs.py")


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect():
    """What earlier files have loaded is not looked through again; Accelerate collects at each end."""
    gc.collect(1)
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _own_hub_folder(tmp_path_factory: pytest.TempPathFactory):
    """Nothing of a hub is shared with the person who runs the tests; libraries look once where it is."""
    folder = tmp_path_factory.getbasetemp()
    is_shared = "PYTEST_XDIST_WORKER" in os.environ  # and so are the programs that look there
    os.environ["HF_HOME"] = str((folder.parent if is_shared else folder) / "hf")


@pytest.fixture(autouse=True, scope="session")
def _forked_teachers(_own_hub_folder: None):
    """The loopback teachers are forked: hundreds are started."""

    class System:
        @property
        def executable(self) -> str:
            return forked_python("teachers")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replay_pipeline.testing.server.sys", System())
        yield


@pytest.fixture(scope="module")
def unread_by_datasets() -> Generator[None]:
    """Publish without having `datasets` load the result: half of a publication, told in `publish/`."""
    from replay_pipeline.stages.audit import AuditResult, dataset

    def loaded(_: object) -> AuditResult:
        """Hold."""
        return AuditResult(judged=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "BLOCKING", {**dataset.BLOCKING, "dataset_loads": loaded})
        yield


@pytest.fixture
def open_path() -> Generator[Path]:
    """A folder that every user may enter: of root, the box runs as nobody.

    It is none of pytest's, whose common folder every start of pytest closes to others again.
    """
    with tempfile.TemporaryDirectory(prefix="open-") as name:
        path = Path(name).resolve()
        path.chmod(0o755)
        yield path


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """No test sees the settings, keys or caches of the person who runs it."""
    for name in (
        "REPLAY_DATA",
        "REPLAY_SETTINGS",
        "REPLAY_TEACHERS",
        "REPLAY_HOME",
        "REPLAY_LEDGER",
        "REPLAY_DAGSTER_DB",
        "REPLAY_WEBHOOK",
        "OPENROUTER_API_KEY",
        "HF_TOKEN",
    ):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path_factory.getbasetemp() / "config" / uuid.uuid4().hex  # made when it is needed
    monkeypatch.setenv("REPLAY_CONFIG_DIR", str(config))
