"""Engines for the databases of the host: one place for URLs, time limits and the translation of driver errors."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import psycopg
from psycopg.abc import Buffer, PQGen
from psycopg.types.datetime import TimestamptzLoader
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, make_url
from sqlalchemy.engine.interfaces import ExceptionContext
from sqlalchemy.exc import ArgumentError, DBAPIError

from pin_jobs.errors import PinJobsError

# 0x50494E4A, "PINJ": the first half of every advisory lock key of ours.
LOCK_NAMESPACE: Final = 1_346_981_450
CONNECT_TIMEOUT_SECONDS: Final = 3
# The first statement of every transaction. A search_path that lists pg_catalog behind other schemas lets functions,
# types and operators of theirs stand in for PostgreSQL's (another now(), another `=`): there, and only there,
# pg_catalog goes to the front. The rest stays as it is, for triggers of the host may live by it. Until this has run any
# name may be taken, so all of these are qualified, and there is no operator. true: as SET LOCAL.
_PREFER_BUILT_INS: Final = """
    SELECT pg_catalog.set_config('search_path', pg_catalog.concat('pg_catalog, ', path), true)
      FROM pg_catalog.current_setting('search_path') AS path
     WHERE pg_catalog.array_position(pg_catalog.current_schemas(false), 'pg_catalog') IS NOT NULL
"""
_Answer = TypeVar("_Answer")
_POSTGRES_SCHEMES: Final = frozenset({"postgres", "postgresql", "postgresql+psycopg", "postgresql+psycopg2"})


class InvalidDatabaseUrl(PinJobsError):
    """A database URL is not one of PostgreSQL; the message names the variable and never the URL."""


class DatabaseUnavailable(PinJobsError):
    """The database cannot be reached, or the connection to it was lost."""


class DatabaseRefused(PinJobsError):
    """The database answered with an error: a missing table or grant, a time limit, a constraint.

    `sqlstate` is its five-character code, `reason` its message without the name of the database.
    """

    def __init__(self, name: str, sqlstate: str, reason: str | None) -> None:
        super().__init__(f"the {name} database refused ({sqlstate}): {reason}")
        self.sqlstate = sqlstate
        self.reason = reason or "no reason given"


def parse_database_url(url: str, *, variable: str, driver: str = "postgresql+psycopg") -> URL:
    """Read a `postgres://` or `postgresql://` URL, whatever driver it names, for the driver that we use.

    Raises:
        InvalidDatabaseUrl: it is no PostgreSQL URL. The message names `variable` and shows nothing of the value.
    """
    form = (
        f"{variable} is not a PostgreSQL URL; its form is postgresql://user:password@host:5432/database, "
        "with special characters of the password percent-encoded (@ is %40)"
    )
    try:
        parsed = make_url(re.sub(r"^postgres://", "postgresql://", url.strip()))
    except (ArgumentError, ValueError):
        raise InvalidDatabaseUrl(form) from None
    # An @ in the host is the rest of a password that was not encoded; the driver would quote it in its error.
    if parsed.drivername not in _POSTGRES_SCHEMES or not parsed.database or "@" in (parsed.host or ""):
        raise InvalidDatabaseUrl(form)
    return parsed.set(drivername=driver)


def connect_to(url: URL, *, application_name: str, answer_timeout: timedelta | None = None) -> Engine:
    """An engine without a pool, so that a restarted server fails no later tick and nothing outlives its run.

    `answer_timeout`: how long to wait for each answer of the server before the connection is given up. The server's own
    limits are of no use when it is frozen, and the network's neither when its machine still answers for it.

    Sessions are read-write at READ COMMITTED, and names that are not qualified mean what they do in PostgreSQL itself,
    whatever the role's defaults say. They prepare no statements, so that a transaction-pooling PgBouncer can stand in
    between. A statement that is interrupted in the worker (Terminate, SIGTERM) is cancelled on the server too, which
    would otherwise go on with it, locks and all.
    """
    engine = create_engine(
        url,
        poolclass=NullPool,
        isolation_level="READ COMMITTED",
        execution_options={"postgresql_readonly": False},
        hide_parameters=True,
        # Else the dialect would look up the hstore type on every new connection.
        use_native_hstore=False,
        connect_args={
            "connect_timeout": CONNECT_TIMEOUT_SECONDS,
            "application_name": application_name,
            # Whatever the role's default: with SQL_ASCII the driver would return bytes for text.
            "client_encoding": "utf8",
            "prepare_threshold": None,
            # A peer that vanished without a FIN: half a minute rather than the two hours of the kernel's default.
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 30_000,
        },
    )
    if answer_timeout is not None:
        _give_up_after(engine, answer_timeout)
    event.listen(engine, "connect", _read_any_moment)
    event.listen(engine, "begin", _prefer_built_ins)
    event.listen(engine, "handle_error", _cancel_interrupted_statement)
    return engine


class _NoAnswer(psycopg.OperationalError):
    """The server keeps silent."""


class _ImpatientConnection(psycopg.Connection[Any]):
    """Closes itself when an answer takes longer than `answer_timeout`: what comes of the statement is not known."""

    answer_timeout: timedelta | None = None

    def wait(self, gen: PQGen[_Answer], *arguments: Any, **options: Any) -> _Answer:
        if self.answer_timeout is not None:
            gen = _bounded(gen, self.answer_timeout)
        try:
            return super().wait(gen, *arguments, **options)
        except _NoAnswer:
            self.close()
            raise


def _bounded(waiting: PQGen[_Answer], timeout: timedelta) -> PQGen[_Answer]:
    """Passes on what the driver waits for, and looks at the time whenever it has waited for an interval in vain."""
    give_up = time.monotonic() + timeout.total_seconds()
    ready: Any = None
    while True:
        try:
            wanted = waiting.send(ready)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # what the generator of the driver returns
        ready = yield wanted
        if not ready and time.monotonic() > give_up:
            raise _NoAnswer(f"no answer for {timeout.total_seconds():g} s")


def _give_up_after(engine: Engine, answer_timeout: timedelta) -> None:
    @event.listens_for(engine, "do_connect")
    def connect(_dialect: object, _record: object, arguments: list[Any], options: dict[str, Any]) -> object:
        connection = _ImpatientConnection.connect(*arguments, **options)
        connection.answer_timeout = answer_timeout
        return connection


class _BoundedTimestamptzLoader(TimestamptzLoader):
    """Reads what PostgreSQL can store and Python cannot, such as -infinity, as the nearest moment that Python has.

    One such row of the host would otherwise fail every cycle that claims it.
    """

    def load(self, data: Buffer) -> datetime:
        try:
            return super().load(data)
        except psycopg.DataError:
            text = bytes(data)
            is_past = text.startswith(b"-") or text.endswith(b"BC")
            return datetime.min.replace(tzinfo=UTC) if is_past else datetime.max.replace(tzinfo=UTC)


def _read_any_moment(connection: psycopg.Connection[Any], _record: object) -> None:
    connection.adapters.register_loader("timestamptz", _BoundedTimestamptzLoader)


def _prefer_built_ins(connection: Connection) -> None:
    connection.exec_driver_sql(_PREFER_BUILT_INS)


def _cancel_interrupted_statement(context: ExceptionContext) -> None:
    if isinstance(context.original_exception, Exception) or context.connection is None:
        return
    driver: Any = context.connection.connection.driver_connection
    if isinstance(driver, psycopg.Connection) and not driver.closed:
        # Whatever comes of it, the interruption goes on; SQLAlchemy would raise our error in its place.
        with suppress(psycopg.Error):
            driver.cancel_safe(timeout=1)


@contextmanager
def clear_errors(name: str) -> Iterator[None]:
    """Translate what the driver raises into our errors: one line, with the database's `name`, without its URL.

    Raises:
        DatabaseUnavailable: no connection, or it was lost.
        DatabaseRefused: any other error of the database.
    """
    try:
        yield
    except DBAPIError as error:
        # Without the driver's own error as the cause: its DETAIL can quote whole rows of the host.
        raise _translated(error, name) from None


def _translated(error: DBAPIError, name: str) -> PinJobsError:
    cause = error.orig
    sqlstate = getattr(cause, "sqlstate", None)
    if not isinstance(cause, psycopg.Error) or sqlstate is None:
        text = " ".join(str(cause).split())
        return DatabaseUnavailable(f"the {name} database cannot be reached: {text}")
    if error.connection_invalidated:
        return DatabaseUnavailable(f"the {name} database hung up ({sqlstate}): {cause.diag.message_primary}")
    return DatabaseRefused(name, sqlstate, cause.diag.message_primary)
