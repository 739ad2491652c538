"""The one transaction of a cycle: bounded in time on both sides, committed explicitly, with a known outcome."""

import logging
import re
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, RootTransaction, RowMapping, TextClause, text
from sqlalchemy.exc import DBAPIError

from pin_jobs.database import DatabaseRefused, DatabaseUnavailable, clear_errors
from pin_jobs.errors import PinJobsError
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.queries import load_queries

DATABASE: Final = "messenger"
_SQL: Final = load_queries(Path(__file__).with_name("queries.sql"))
QUERIES: Final = {name: text(sql) for name, sql in _SQL.items()}
# The same where the schema pin_jobs is missing or behind: nothing is in quarantine.
QUERIES_WITHOUT_SCHEMA: Final = {
    name: text(
        re.sub(
            r"\b(FROM|JOIN) pin_jobs\.quarantined_calls AS",
            r"\1 (SELECT CAST(NULL AS uuid) AS call_id, CAST(NULL AS text) AS phase, 0 AS attempts, "
            "now() AS next_attempt WHERE false) AS",
            sql,
        )
    )
    for name, sql in _SQL.items()
}

# Of max_run_duration: by how much the limits that the server was told of may be out of date.
TOLERANCE = 0.01
# How long a lost answer to COMMIT is asked after before we say that we do not know.
_OUTCOME_PATIENCE: Final = timedelta(seconds=5)
_OUTCOME_INTERVAL: Final = timedelta(milliseconds=200)


class CycleTooLong(PinJobsError):
    """The cycle is past `max_run_duration`; its batch is rolled back and the next cycle finds the same calls."""

    def __init__(self, options: CallTimeoutReaperOptions) -> None:
        super().__init__(
            f"the cycle took longer than max_run_duration ({options.max_run_duration.total_seconds():g}s) "
            "and is rolled back; the next one finds the same calls"
        )


class OutcomeUnknown(PinJobsError):
    """The answer to COMMIT was lost, and the database does not say what became of the batch."""

    def __init__(self, run_id: str, *, has_record: bool) -> None:
        sign = (
            f"pin_jobs.reaper_cycles has run_id '{run_id}'"
            if has_record
            else "the calls that op claim lists are closed"
        )
        super().__init__(
            "outcome unknown: the answer to COMMIT was lost and the database does not tell what became of it. "
            f"The cycle is committed if {sign}"
        )


class CycleTransaction:
    """A transaction that commits in `commit` alone; `close` rolls back whatever else happened.

    Raises, in every method: DatabaseUnavailable, DatabaseRefused; CycleTooLong past `max_run_duration`.
    """

    def __init__(
        self,
        engine: Engine,
        options: CallTimeoutReaperOptions,
        *,
        run_id: str,
        application_name: str,
        log: logging.Logger,
    ) -> None:
        self._engine = engine
        self._options = options
        self._run_id = run_id
        self._log = log
        self._started = time.monotonic()
        self._queries: Mapping[str, TextClause] = QUERIES
        self._bounded_at: timedelta | None = None
        self._connection: Connection = self._open(application_name)
        self._transaction: RootTransaction | None = self._connection.get_transaction()

    @property
    def elapsed(self) -> timedelta:
        """Since the transaction began, on the worker's monotonic clock."""
        return timedelta(seconds=time.monotonic() - self._started)

    @property
    def time_left(self) -> timedelta:
        """Until `max_run_duration` is over."""
        return self._options.max_run_duration - self.elapsed

    @property
    def has_schema(self) -> bool:
        """Whether the schema `pin_jobs` is there and new enough; without it there is neither quarantine nor record."""
        return self._queries is QUERIES

    @property
    def is_open(self) -> bool:
        """Whether there is anything left to commit or to roll back."""
        return self._transaction is not None

    def rows(self, query: str, **parameters: Any) -> Sequence[RowMapping]:
        """Run a named statement within what is left of the cycle's time; return its rows."""
        return self._execute(self._queries[query], parameters)

    def value(self, query: str, **parameters: Any) -> Any:
        """Run a named statement that returns one row of one column; return that value."""
        ((value,),) = (row.values() for row in self.rows(query, **parameters))
        return value

    def run(self, query: str, **parameters: Any) -> None:
        """Run a named statement whose rows, if any, do not matter."""
        self.rows(query, **parameters)

    def undo_batch(self) -> None:
        """Go back to `savepoint_batch`: all calls are as they were, and still locked."""
        self._undo("roll_back_to_savepoint_batch")

    def undo_part(self) -> None:
        """Go back to `savepoint_part` and end it."""
        self._undo("roll_back_to_savepoint_part")
        self.run("release_savepoint_part")

    def commit(self) -> None:
        """Commit, and find out what is true when the answer does not come.

        With the schema `pin_jobs`, `reaper_cycles` must hold a row of this run by now: it is there if, and only if, the
        commit took place.

        Raises:
            OutcomeUnknown: the connection broke in COMMIT and the database does not tell.
        """
        transaction_id = str(self.value("transaction_id"))
        self._check_time()
        if self._transaction is None:
            raise RuntimeError("commit after close")
        try:
            with clear_errors(DATABASE):
                self._transaction.commit()
        except DatabaseUnavailable as error:
            committed = self._was_committed(transaction_id)
            if committed is None:
                raise OutcomeUnknown(self._run_id, has_record=self.has_schema) from None
            if not committed:
                raise
            self._log.warning("the answer to COMMIT was lost (%s), but the cycle is committed", error)
        except Exception:
            raise
        except BaseException:
            # Terminate or SIGTERM while the answer was under way: the run ends, and the log says what is true.
            committed = self._was_committed(transaction_id)
            truth = {True: "the cycle is committed", False: "nothing is committed", None: "the outcome is unknown"}
            self._log.warning("the run was interrupted in COMMIT, and %s", truth[committed])
            raise
        finally:
            self._transaction = None
            self.close()

    def close(self) -> None:
        """Roll back what is open and end the session. A database that is gone rolls back by itself: no error."""
        transaction, self._transaction = self._transaction, None
        try:
            with clear_errors(DATABASE):
                if transaction is not None:
                    transaction.rollback()
                self._connection.close()
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._log.warning("the session is lost, the server rolls it back: %s", error)
            self._connection.invalidate()

    def _open(self, application_name: str) -> Connection:
        with clear_errors(DATABASE):
            connection = self._engine.connect()
            try:
                connection.begin()
                session = connection.execute(
                    QUERIES["bound_session"],
                    {"application_name": application_name, "lock_ttl": _milliseconds(self._options.lock_ttl)},
                )
                self._queries = QUERIES if session.one().has_schema else QUERIES_WITHOUT_SCHEMA
            except BaseException:
                connection.close()
                raise
            return connection

    def _undo(self, query: str) -> None:
        # No other statement before it, not even our bounds: after an error the server takes nothing else.
        with clear_errors(DATABASE):
            self._connection.execute(QUERIES[query])
        # The bounds are as they were at the savepoint.
        self._bounded_at = None

    def _execute(self, statement: Any, parameters: Mapping[str, Any]) -> Sequence[RowMapping]:
        self._check_time()
        try:
            with clear_errors(DATABASE):
                self._bound()
                result = self._connection.execute(statement, parameters)
                return result.mappings().all() if result.returns_rows else ()
        except DatabaseRefused:
            self._check_time()
            raise

    def _bound(self) -> None:
        """Tell the server what is left of the cycle's time, unless it knows well enough."""
        elapsed = self.elapsed
        if self._bounded_at is not None and elapsed - self._bounded_at < self._options.max_run_duration * TOLERANCE:
            return
        bounds = {
            # A millisecond more, so that our own check finds the time spent and names the option.
            "statement_timeout": _milliseconds(self._options.max_run_duration - elapsed + timedelta(milliseconds=1)),
            "idle_timeout": _milliseconds(self._options.lock_ttl - elapsed),
        }
        self._connection.execute(QUERIES["bound_statement"], bounds)
        self._bounded_at = elapsed

    def _check_time(self) -> None:
        if self.elapsed >= self._options.max_run_duration:
            raise CycleTooLong(self._options)

    def _was_committed(self, transaction_id: str) -> bool | None:
        """Whether the commit took place, asked on a new session for a while; `None`: the server does not tell."""
        give_up = time.monotonic() + _OUTCOME_PATIENCE.total_seconds()
        while time.monotonic() < give_up:
            try:
                with self._engine.connect() as connection:
                    outcome = connection.scalar(QUERIES["transaction_outcome"], {"transaction_id": transaction_id})
                    if outcome != "in progress":
                        if self.has_schema:
                            return bool(connection.scalar(QUERIES["find_cycle"], {"run_id": self._run_id}))
                        if outcome is not None:
                            return bool(outcome == "committed")
            except DBAPIError as error:
                self._log.warning("asking after the outcome of COMMIT: %s", type(error.orig).__name__)
            time.sleep(_OUTCOME_INTERVAL.total_seconds())
        return None


def _milliseconds(duration: timedelta) -> str:
    # Never 0, which PostgreSQL reads as "no limit".
    return str(max(1, duration // timedelta(milliseconds=1)))
