"""Where Dagster keeps runs, events and ticks, as our dagster.yaml has it. A host with its own does not need this."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dagster import Field
from dagster._core.storage.base_storage import DagsterStorage
from dagster._core.storage.sqlite_storage import DagsterSqliteStorage
from dagster._serdes import ConfigurableClassData
from dagster_postgres import DagsterPostgresStorage
from sqlalchemy import URL, NullPool, create_engine, text

from pin_jobs.database import LOCK_NAMESPACE, clear_errors, parse_database_url
from pin_jobs.errors import PinJobsError


class StorageNotConfigured(PinJobsError):
    """The variable with the URL of Dagster's database is not set."""

    def __init__(self, variable: str) -> None:
        super().__init__(f"{variable} is not set: the PostgreSQL URL where Dagster keeps runs, events and ticks")


class PostgresStorage(DagsterPostgresStorage):
    """`DagsterPostgresStorage` for any way of writing the URL, read from the variable `url_variable`.

    dagster-postgres works with psycopg2 alone, but with SQLAlchemy 2.1 a bare `postgresql://` means psycopg 3, and
    every event of every run fails.

    A one-off command without DAGSTER_HOME (`dagster job execute` beside our dagster.yaml) runs on an instance that
    Dagster throws away afterwards; it needs no database of Dagster's and gets a temporary one.
    """

    @classmethod
    def config_type(cls) -> Mapping[str, Field]:
        """The `config` of the `storage` block."""
        return {"url_variable": Field(str, description="The variable that holds the PostgreSQL URL.")}

    @classmethod
    def from_config_value(  # type: ignore[override]  # Dagster types the factory as building its own class
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> DagsterStorage:
        """Called by Dagster.

        Raises:
            StorageNotConfigured, InvalidDatabaseUrl: the message names the variable, never its value.
        """
        variable = config_value["url_variable"]
        if value := os.environ.get(variable, "").strip():
            url = parse_database_url(value, variable=variable, driver="postgresql+psycopg2")
            with _one_at_a_time(url):
                return cls(postgres_url=url.render_as_string(hide_password=False), inst_data=inst_data)
        if os.environ.get("DAGSTER_HOME", "").strip():
            raise StorageNotConfigured(variable)
        directory = tempfile.mkdtemp(prefix="pin_jobs_one_off_")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        return DagsterSqliteStorage.from_local(directory, inst_data)


@contextmanager
def _one_at_a_time(url: URL) -> Iterator[None]:
    """Hold a lock of the database while Dagster looks for its tables and creates what is missing.

    The web server and the daemon start together, and on an empty database one of them would find a table half created
    by the other and die. Who freezes in here loses the lock after a while.
    """
    with clear_errors("Dagster"):
        connection = create_engine(url, poolclass=NullPool).connect()
    with connection:
        connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = '30s'"))
        connection.execute(text(f"SELECT pg_advisory_xact_lock({LOCK_NAMESPACE}, 1001)"))
        yield
