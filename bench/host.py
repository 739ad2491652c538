"""Messenger databases to measure on: a server of its own, on disk, with everything that makes a commit durable."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from pin_jobs.migrations import migrate_messenger
from pin_jobs.sandbox.host_tables import create_messenger_tables
from pin_jobs.sandbox.servers import EmbeddedPostgres
from pin_jobs_tests.conftest import Server
from pin_jobs_tests.factories import Messenger

# Statistics and clean-up come when a benchmark says so, and checkpoints not in the middle of one.
_SETTINGS = ("autovacuum = off", "maintenance_work_mem = '512MB'", "max_wal_size = '16GB'", "checkpoint_timeout = '1h'")


@contextmanager
def bench_server(folder: Path | None) -> Iterator[Server]:
    """Gone at the end. `folder`: on which disk; the system's place for temporary files when it is not given."""
    with (
        tempfile.TemporaryDirectory(prefix="pin_jobs_bench_", dir=folder) as home,
        EmbeddedPostgres(Path(home) / "pg") as postgres,
    ):
        server = Server(postgres.url("postgres"))
        for setting in _SETTINGS:
            server.run(f"ALTER SYSTEM SET {setting}")
        server.run("SELECT pg_reload_conf()")
        yield server


def new_messenger(server: Server) -> Messenger:
    """An empty messenger database, migrated, with the role of the jobs."""
    name = server.create()
    create_messenger_tables(server.url(name))
    migrate_messenger(server.url(name))
    server.grant(name)
    return server.messenger(name)


def execute(messenger: Messenger, *statements: str) -> None:
    """Statements of the owner, each in a transaction of its own: VACUUM takes part in no other."""
    url = messenger.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)  # type: ignore[call-overload]  # SQL of our own


def print_table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    """Columns as wide as they need to be; numbers to the right."""
    cells = [head, *[tuple(f"{cell:,.2f}" if isinstance(cell, float) else f"{cell}" for cell in row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    is_number = [isinstance(cell, int | float) for cell in rows[0]]
    for row in cells:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        print("  ".join(padded).rstrip())
