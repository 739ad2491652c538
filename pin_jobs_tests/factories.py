"""Calls for tests, named for what matters about them: `a_ringing_call(age="46s")`."""

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from pin_jobs.database import connect_to, parse_database_url

_UNITS = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "d": 86400}


def duration(words: str) -> timedelta:
    """`46s`, `44.999s`, `10min`, `5h`, `10d`, also negative."""
    match = re.fullmatch(r"(-?[0-9.]+)(ms|s|min|h|d)", words)
    assert match, words
    return timedelta(seconds=float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True)
class StoredCall:
    """A row of `messenger.call_sessions`; ages count back from the database's clock at the moment of the insert."""

    status: str
    started_age: timedelta
    updated_age: timedelta
    answered_age: timedelta | None = None
    id: uuid.UUID = field(default_factory=uuid.uuid4)
    caller_user_id: uuid.UUID = field(default_factory=uuid.uuid4)
    callee_user_id: uuid.UUID = field(default_factory=uuid.uuid4)
    media_type: str = "Audio"
    end_reason: str | None = None
    ended_age: timedelta | None = None
    duration_seconds: int | None = None


def a_ringing_call(age: str = "1s", **values: Any) -> StoredCall:
    return StoredCall(status="Ringing", started_age=duration(age), updated_age=duration(age), **values)


def an_answered_call(age: str = "5min", last_sign_of_life: str = "1s", **values: Any) -> StoredCall:
    started = duration(age)
    return StoredCall(
        status="Answered",
        started_age=started,
        updated_age=duration(last_sign_of_life),
        answered_age=started - timedelta(seconds=5),
        **values,
    )


def a_finished_call(status: str = "Ended", age: str = "3h", **values: Any) -> StoredCall:
    reason = {"Ended": "Hangup", "Declined": "Declined", "Missed": "Timeout", "Failed": "Error"}[status]
    started = duration(age)
    values = {"end_reason": reason, "ended_age": started, **values}
    return StoredCall(status=status, started_age=started, updated_age=started, **values)


def note_transactions(messenger: "Messenger", *tables: str) -> None:
    """The host keeps in `public.writes` which transaction changed or inserted which row of these tables.

    A row's xmin would not tell: it is that of the subtransaction.
    """
    messenger.run(
        """
        CREATE TABLE public.writes (name text, transaction text);
        CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
        BEGIN INSERT INTO public.writes VALUES (TG_TABLE_NAME, pg_current_xact_id()::text); RETURN NULL; END $$
        """
    )
    for table in tables:
        messenger.run(
            f"CREATE TRIGGER note AFTER INSERT OR UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION public.note()"
        )
    messenger.run("TRUNCATE public.writes")


_INSERT = text(
    """
    INSERT INTO messenger.call_sessions
           (id, caller_user_id, callee_user_id, media_type, status, end_reason,
            started_at, answered_at, ended_at, duration_seconds, updated_at)
    VALUES (:id, :caller_user_id, :callee_user_id, :media_type, :status, :end_reason,
            clock_timestamp() - CAST(:started_age AS interval), clock_timestamp() - CAST(:answered_age AS interval),
            clock_timestamp() - CAST(:ended_age AS interval), :duration_seconds,
            clock_timestamp() - CAST(:updated_age AS interval))
    """
)


@lru_cache(maxsize=64)
def _engine_of_the_host(url: str) -> Engine:
    # A new connection each time, but not also the questions that a new engine asks on its first.
    return connect_to(parse_database_url(url, variable="URL of the test"), application_name="test")


@dataclass(frozen=True)
class Database:
    """A database of one test, seen from outside: nothing here is what is being tested.

    `url` is its owner's, who does what the host does; `jobs_url` that of the least-privilege role that the jobs run as.
    """

    url: str
    jobs_url: str = ""

    @property
    def engine(self) -> Engine:
        return _engine_of_the_host(self.url)

    @property
    def jobs_engine(self) -> Engine:
        assert self.jobs_url, "this database has no role for the jobs"
        return connect_to(parse_database_url(self.jobs_url, variable="URL of the test"), application_name="test")

    def locks(self) -> Sequence[Mapping[str, Any]]:
        """Advisory locks, and row locks by way of the tables that a foreign session has locked."""
        return self.rows(
            "SELECT locktype, relation::regclass::text AS relation, mode, pid FROM pg_locks "
            "WHERE pid <> pg_backend_pid() AND (locktype = 'advisory' OR mode = 'RowExclusiveLock') "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )

    def rows(self, sql: str, **parameters: Any) -> Sequence[Mapping[str, Any]]:
        with self.engine.begin() as connection:
            result = connection.execute(text(sql), parameters)
            return result.mappings().all() if result.returns_rows else ()

    def value(self, sql: str, **parameters: Any) -> Any:
        ((value,),) = (row.values() for row in self.rows(sql, **parameters))
        return value

    def run(self, sql: str, **parameters: Any) -> None:
        self.rows(sql, **parameters)

    @contextmanager
    def holding(
        self, sql: str, *, application_name: str = "rival", by_our_role: bool = False, **parameters: Any
    ) -> Iterator[Connection]:
        """Another session that has run `sql` and keeps its transaction, locks and all, open; rolled back at the end."""
        url = self.jobs_url if by_our_role else self.url
        engine = connect_to(parse_database_url(url, variable="URL of the test"), application_name=application_name)
        connection = engine.connect()
        try:
            connection.execute(text(sql), parameters)
            yield connection
        finally:
            # It may have been ended from outside.
            with suppress(DBAPIError):
                connection.close()


class Messenger(Database):
    """A messenger database of one test."""

    def add(self, *calls: StoredCall) -> Sequence[StoredCall]:
        with self.engine.begin() as connection:
            connection.execute(_INSERT, [vars(call) for call in calls])
        return calls

    def add_many(self, count: int, status: str = "Ringing", *, started_at: str = "now() - interval '5 hours'") -> None:
        """Calls that are due, if they started long enough ago; `started_at` is SQL, in which `i` counts from 1."""
        self.run(
            "INSERT INTO messenger.call_sessions "
            "(id, caller_user_id, callee_user_id, media_type, status, started_at, updated_at) "
            "SELECT gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 'Audio', :status, at, at "
            f"FROM (SELECT {started_at} AS at FROM generate_series(1, :count) AS i) AS calls",
            status=status,
            count=count,
        )

    def call(self, call: StoredCall) -> Mapping[str, Any]:
        (row,) = self.rows("SELECT * FROM messenger.call_sessions WHERE id = :id", id=call.id)
        return row

    def status(self, call: StoredCall) -> str:
        return str(self.call(call)["status"])

    def statuses(self) -> dict[str, int]:
        rows = self.rows("SELECT status, count(*) AS n FROM messenger.call_sessions GROUP BY status")
        return {row["status"]: row["n"] for row in rows}

    def outbox(self, call: StoredCall | None = None) -> Sequence[Mapping[str, Any]]:
        rows = self.rows("SELECT * FROM messenger.realtime_outbox ORDER BY created_at, id")
        return [row for row in rows if call is None or row["payload"]["callId"] == str(call.id)]

    def cycles(self) -> Sequence[Mapping[str, Any]]:
        return self.rows("SELECT * FROM pin_jobs.reaper_cycles ORDER BY as_of")
