"""The facts that `pin-jobs check` judges: a server and what it has, read in a transaction that is rolled back."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, text

from pin_jobs.contract import Contract, Finding, FoundColumn, FoundIndex, Server, Table, error
from pin_jobs.database import DatabaseRefused, clear_errors
from pin_jobs.queries import load_queries

_QUERIES: Final = {name: text(sql) for name, sql in load_queries(Path(__file__).with_name("catalogue.sql")).items()}
_TIMEOUT_MS: Final = "10000"


def this_clock() -> datetime:
    """The clock of this machine."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What the catalogue says about the server and the tables of a contract, by name: those that there are."""

    connection: Connection
    server: Server
    tables: Mapping[str, Table]


@contextmanager
def open_catalogue(
    engine: Engine, database: str, contract: Contract, worker_clock: Callable[[], datetime]
) -> Iterator[Catalogue]:
    """Read it, in a transaction that changes nothing, ends in seconds, and may be used for more reading.

    Raises:
        DatabaseUnavailable, DatabaseRefused: it cannot be reached, or not even be looked at.
    """
    with clear_errors(database), engine.connect() as connection:
        server = _server(connection, worker_clock)
        connection.execute(_QUERIES["bound_check"], {"timeout": _TIMEOUT_MS})
        yield Catalogue(connection, server, _tables(connection, [*contract.host, *contract.ours]))


def read_indexes(connection: Connection, names: Iterable[str]) -> dict[str, list[FoundIndex]]:
    """Per table its indexes, oldest first."""
    indexes: dict[str, list[FoundIndex]] = {name: [] for name in names}
    for row in connection.execute(_QUERIES["read_indexes"], {"names": list(indexes)}).mappings():
        facts = dict(row)
        indexes[facts.pop("table_name")].append(FoundIndex(**facts))
    return indexes


def explain(
    connection: Connection,
    database: str,
    statements: Iterable[tuple[str, str]],
    parameters: Mapping[str, Any],
) -> tuple[Mapping[str, str], Finding | None]:
    """The plan of each statement by its purpose, up to the first that does not work, and what is wrong with that one.

    `statements`: purpose and text. `parameters`: a value for every bind of them all.
    """
    plans: dict[str, str] = {}
    for purpose, statement in statements:
        try:
            with clear_errors(database):
                plans[purpose] = "\n".join(connection.scalars(text(f"EXPLAIN {statement}"), parameters).all())
        except DatabaseRefused as refusal:
            return plans, error(f"{purpose} does not work: {refusal.reason} ({refusal.sqlstate})")
    return plans, None


def _server(connection: Connection, worker_clock: Callable[[], datetime]) -> Server:
    # The settings first: that is the session as the role gets it.
    settings = {
        row.name: timedelta(milliseconds=row.milliseconds) for row in connection.execute(_QUERIES["read_settings"])
    }
    before = worker_clock()
    row = dict(connection.execute(_QUERIES["read_server"]).mappings().one())
    after = worker_clock()
    pid, now = row.pop("pid"), row.pop("now")
    # A pooler makes up the process id that it gives to its clients.
    driver: Any = connection.connection.driver_connection
    return Server(
        **row,
        settings=settings,
        skew=_skew(before, now, after),
        is_pooled=driver.info.backend_pid != pid,
    )


def _skew(before: datetime, server: datetime, after: datetime) -> timedelta:
    """How far the worker's clock is ahead, as far as the way to the server and back leaves no other explanation."""
    if server < before:
        return before - server
    return min(after - server, timedelta(0))


def _tables(connection: Connection, names: list[str]) -> dict[str, Table]:
    columns: dict[str, dict[str, FoundColumn]] = {}
    for row in connection.execute(_QUERIES["read_columns"], {"names": names}):
        columns.setdefault(row.table_name, {})[row.name] = FoundColumn(
            type=row.type,
            length=row.length,
            is_required=row.is_required,
            has_default=row.has_default,
            is_generated=row.is_generated,
            privileges=frozenset(row.privileges),
        )
    return {
        row.name: Table(
            kind=row.kind,
            is_reachable=row.is_reachable,
            hides_rows=row.hides_rows,
            is_owned=row.is_owned,
            rows=row.rows,
            privileges=frozenset(row.privileges),
            columns=columns.get(row.name, {}),
        )
        for row in connection.execute(_QUERIES["read_tables"], {"names": names})
    }
