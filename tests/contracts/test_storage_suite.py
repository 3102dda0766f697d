"""`make test-storage` asks Dagster's own suites of the fast storage, or says why it cannot."""

import dagster
import pytest

from tests.storage.source import suite


def test_without_dagsters_sources_the_suites_say_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("DAGSTER_SOURCE", str(tmp_path))
    with pytest.raises(
        pytest.UsageError, match=f"source distribution of Dagster {dagster.__version__}"
    ):
        suite("test_event_log")
    monkeypatch.delenv("DAGSTER_SOURCE")
    with pytest.raises(pytest.UsageError, match="no dagster_tests/storage_tests there"):
        suite("test_event_log")


@pytest.mark.parametrize("folder", [".", "python_modules/dagster"])
def test_the_suites_of_another_dagster_are_refused(tmp_path, monkeypatch, folder):
    (tmp_path / folder / "dagster_tests" / "storage_tests").mkdir(parents=True)
    (tmp_path / folder / "dagster").mkdir()
    (tmp_path / folder / "dagster" / "version.py").write_text('__version__ = "1.2.3"\n')
    monkeypatch.setenv("DAGSTER_SOURCE", str(tmp_path))
    with pytest.raises(pytest.UsageError, match=r"it is Dagster 1\.2\.3, and"):
        suite("test_event_log")
