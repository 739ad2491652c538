import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dagster import DagsterInstance, job, op
from dagster._core.run_coordinator import QueuedRunCoordinator
from dagster._core.storage.sqlite_storage import DagsterSqliteStorage
from sqlalchemy import text

from pin_jobs.database import InvalidDatabaseUrl
from pin_jobs.errors import PinJobsError
from pin_jobs.resources.dagster_storage import PostgresStorage, StorageNotConfigured
from pin_jobs_tests.factories import Messenger
from pin_jobs_tests.waiting import wait_for

ROOT = Path(__file__).parent.parent.parent
STORAGE = {"url_variable": "DAGSTER_DATABASE_URL"}


@op
def say_hello(context):
    context.log.info("hello")


@job
def greet():
    say_hello()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A DAGSTER_HOME with our dagster.yaml."""
    shutil.copy(ROOT / "dagster.yaml", tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.delenv("DAGSTER_DATABASE_URL", raising=False)
    return tmp_path


def written_as(scheme: str, url: str) -> str:
    return f"{scheme}://{url.split('://', 1)[1]}"


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_a_run_and_its_events_are_kept_however_the_url_is_written(home, empty_database, monkeypatch, scheme):
    monkeypatch.setenv("DAGSTER_DATABASE_URL", written_as(scheme, empty_database))
    with DagsterInstance.from_config(str(home)) as instance:
        result = greet.execute_in_process(instance=instance)
        assert result.success
    with DagsterInstance.from_config(str(home)) as instance:
        assert instance.get_run_by_id(result.run_id).is_success
        messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
        assert "hello" in messages
    assert Messenger(empty_database).value("SELECT count(*) FROM runs") == 1


def test_those_that_start_together_fill_an_empty_database_one_after_the_other(empty_database, monkeypatch):
    # Two at once make one of them fail, though rarely: dagster-postgres creates its tables without a lock.
    monkeypatch.setenv("DAGSTER_DATABASE_URL", empty_database)
    database = Messenger(empty_database)
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with ThreadPoolExecutor(2) as pool:
        with database.engine.begin() as first:
            first.execute(text("SELECT pg_advisory_xact_lock(1346981450, 1001)"))
            starts = [pool.submit(PostgresStorage.from_config_value, None, STORAGE) for _ in range(2)]
            wait_for(lambda: database.value(waiting) == 2, timeout=10, what="both to wait for the first")
            assert database.value("SELECT to_regclass('runs') IS NULL")
        assert all(isinstance(start.result(timeout=30), PostgresStorage) for start in starts)
    assert database.value("SELECT count(*) FROM runs") == 0


def test_our_dagster_yaml_says_what_the_jobs_need_to_be_punctual(home, empty_database, monkeypatch):
    monkeypatch.setenv("DAGSTER_DATABASE_URL", empty_database)
    with DagsterInstance.from_config(str(home)) as instance:
        coordinator = instance.run_coordinator
        assert isinstance(coordinator, QueuedRunCoordinator)
        assert coordinator.dequeue_interval_seconds == 1
        assert coordinator.dequeue_use_threads
        assert instance.get_settings("sensors") == {"use_threads": True, "num_workers": 8}
        assert instance.run_monitoring_enabled
        assert not instance.telemetry_enabled
        assert not instance.nux_enabled


def test_ticks_of_the_sensor_are_not_kept_for_ever(home, empty_database, monkeypatch):
    monkeypatch.setenv("DAGSTER_DATABASE_URL", empty_database)
    with DagsterInstance.from_config(str(home)) as instance:
        days = instance.get_settings("retention")["sensor"]["purge_after_days"]
    assert days.keys() == {"skipped", "started", "success", "failure"}
    assert all(0 < value <= 30 for value in days.values())


@pytest.mark.parametrize("value", [None, "", " "])
def test_a_missing_variable_is_named(home, monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("DAGSTER_DATABASE_URL", value)
    with pytest.raises(StorageNotConfigured, match=r"^DAGSTER_DATABASE_URL is not set"):
        _use(home)


@pytest.mark.parametrize("value", ["mysql://u:s3cr3t@h/d", "s3cr3t"])
def test_a_bad_url_is_refused_by_the_name_of_its_variable(home, monkeypatch, value):
    monkeypatch.setenv("DAGSTER_DATABASE_URL", value)
    with pytest.raises(InvalidDatabaseUrl) as error:
        _use(home)
    assert str(error.value).startswith("DAGSTER_DATABASE_URL is not a PostgreSQL URL")


def test_a_one_off_command_without_a_home_gets_a_temporary_storage(monkeypatch):
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.delenv("DAGSTER_DATABASE_URL", raising=False)
    storage = PostgresStorage.from_config_value(None, {"url_variable": "DAGSTER_DATABASE_URL"})
    assert isinstance(storage, DagsterSqliteStorage)
    storage.dispose()


def test_an_error_of_the_storage_is_one_of_ours():
    assert issubclass(StorageNotConfigured, PinJobsError)


def _use(home):
    with DagsterInstance.from_config(str(home)) as instance:
        return instance.get_runs_count()
