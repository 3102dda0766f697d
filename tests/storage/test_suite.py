"""What Dagster asks of a storage, asked of the fast one: its own suites, with its own checks."""

import dagster as dg
import pytest
from dagster._utils.test import schedule_storage as schedules

from replay_pipeline.orchestration.sqlite_storage import fast
from tests.storage.source import suite

events, runs = suite("test_event_log"), suite("test_run_storage")
cursors, caches = suite("utils.daemon_cursor_storage"), suite("utils.partition_status_cache")


@pytest.fixture
def fast_instance(tmp_path):
    storage = {
        "module": "replay_pipeline.orchestration.sqlite_storage",
        "class": "FastSqliteStorage",
        "config": {"base_dir": str(tmp_path)},
    }
    with dg.instance_for_test(
        temp_dir=str(tmp_path), overrides={"storage": {"custom": storage}}
    ) as instance:
        assert type(instance.event_log_storage) is fast.FastEventLogStorage
        assert type(instance.run_storage) is fast._FastRunStorage
        assert type(instance.schedule_storage) is fast._FastScheduleStorage
        yield instance


class OnFast:
    """Mixed into a suite: its instance has the fast storage."""

    __test__ = True

    @pytest.fixture(name="instance")
    def instance(self, fast_instance):
        return fast_instance


class TestEvents(OnFast, events.TestSqliteEventLogStorage):
    @pytest.fixture(name="storage")
    def event_log_storage(self, instance):
        return instance.event_log_storage

    def cmd(self, exceptions, tmpdir_path):
        """What five processes do at once."""
        storage = fast.FastEventLogStorage(tmpdir_path)
        try:
            storage.get_logs_for_run("foo")
        except Exception as error:  # noqa: BLE001 (the suite looks at it)
            exceptions.put(error)
        storage.dispose()


class TestRuns(OnFast, runs.TestSqliteRunStorage):
    @pytest.fixture(name="storage")
    def run_storage(self, instance):
        return instance.run_storage


class TestSchedules(OnFast, schedules.TestScheduleStorage):
    @pytest.fixture(name="storage")
    def schedule_storage(self, instance):
        return instance.schedule_storage


class TestCursors(OnFast, cursors.TestDaemonCursorStorage):
    @pytest.fixture(name="storage")
    def cursor_storage(self, instance):
        return instance.run_storage


class TestPartitionCaches(OnFast, caches.TestPartitionStatusCache):
    pass
