"""`pin-jobs check` for a messenger database: reads the facts, in a transaction that is rolled back, and judges them."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from pin_jobs.database import DatabaseRefused, clear_errors
from pin_jobs.messenger.calls import RETRY_DELAYS
from pin_jobs.messenger.contract import (
    CALLS,
    CYCLES,
    OURS,
    OUTBOX,
    QUARANTINE,
    REVISION,
    Finding,
    FoundColumn,
    Server,
    Severity,
    Table,
    check_plans,
    check_revision,
    check_server,
    check_tables,
)
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.messenger.transaction import DATABASE, QUERIES, QUERIES_WITHOUT_SCHEMA
from pin_jobs.queries import load_queries

_CHECKS: Final = {name: text(sql) for name, sql in load_queries(Path(__file__).with_name("check.sql")).items()}
_TIMEOUT_MS: Final = "10000"
# What the jobs run, explained one by one: whatever the comparison with the contract overlooks shows here.
_EXPLAINED: Final = {
    "probe": "the sensor's look",
    "find_backlog": "the look for a backlog",
    "claim_ring_timeout": "the claim of ringing calls",
    "claim_stale_answered": "the claim of answered calls",
    "count_due": "the count of due calls",
    "transition_calls": "the update of calls",
    "insert_outbox_rows": "the insert into the outbox",
}
_LOOKS: Final = ("probe", "find_backlog", "claim_ring_timeout", "claim_stale_answered", "count_due")


def check_messenger(
    engine: Engine,
    options: CallTimeoutReaperOptions,
    revisions: Sequence[str],
    *,
    worker_clock: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> list[Finding]:
    """Every difference between a live messenger database and what the jobs need, errors first.

    `revisions`: those of the schema `pin_jobs`, oldest first. `worker_clock`: the clock of this machine.

    Raises:
        DatabaseUnavailable, DatabaseRefused: it cannot be reached, or not even be looked at.
    """
    with clear_errors(DATABASE), engine.connect() as connection:
        server = _server(connection, worker_clock)
        connection.execute(_CHECKS["bound_check"], {"timeout": _TIMEOUT_MS})
        tables = _tables(connection)
        findings = [
            *check_server(server, lock_ttl=options.lock_ttl, max_run_duration=options.max_run_duration),
            *check_tables(tables),
        ]
        if _may_read(tables.get(REVISION)):
            findings += check_revision(connection.scalar(_CHECKS["read_revision"]), revisions, tables)
        elif REVISION not in tables:
            findings += check_revision(None, revisions, tables)
        is_broken = any(finding.severity is Severity.ERROR for finding in findings)
        # An error found already would only be found again, less clearly.
        if not is_broken:
            findings += _explain(connection, options, has_schema={CYCLES, QUARANTINE} <= tables.keys())
    return sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR)


def _server(connection: Connection, worker_clock: Callable[[], datetime]) -> Server:
    # The settings first: that is the session as the role gets it.
    settings = {
        row.name: timedelta(milliseconds=row.milliseconds) for row in connection.execute(_CHECKS["read_settings"])
    }
    before = worker_clock()
    row = dict(connection.execute(_CHECKS["read_server"]).mappings().one())
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


def _tables(connection: Connection) -> dict[str, Table]:
    names = {"names": [CALLS, OUTBOX, *OURS]}
    columns: dict[str, dict[str, FoundColumn]] = {}
    for row in connection.execute(_CHECKS["read_columns"], names):
        columns.setdefault(row.table_name, {})[row.name] = FoundColumn(
            type=row.type,
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
            privileges=frozenset(row.privileges),
            columns=columns.get(row.name, {}),
        )
        for row in connection.execute(_CHECKS["read_tables"], names)
    }


def _may_read(table: Table | None) -> bool:
    return table is not None and table.is_reachable and "SELECT" in table.privileges


def _explain(connection: Connection, options: CallTimeoutReaperOptions, *, has_schema: bool) -> list[Finding]:
    connection.execute(_CHECKS["avoid_seq_scans"])
    plans: dict[str, str] = {}
    queries = QUERIES if has_schema else QUERIES_WITHOUT_SCHEMA
    for query, purpose in _EXPLAINED.items():
        try:
            with clear_errors(DATABASE):
                lines = connection.scalars(text(f"EXPLAIN {queries[query].text}"), _parameters(options)).all()
        except DatabaseRefused as error:
            return [Finding(Severity.ERROR, f"{purpose} does not work: {error.reason} ({error.sqlstate})")]
        if query in _LOOKS:
            plans[purpose] = "\n".join(lines)
    return list(check_plans(plans, connection.scalars(_CHECKS["read_indexes"], {"name": CALLS}).all()))


def _parameters(options: CallTimeoutReaperOptions) -> dict[str, Any]:
    """A value of the right type for every bind of the statements that are explained."""
    no_uuids: list[UUID] = []
    no_texts: list[str] = []
    return {
        "as_of": datetime.now(UTC),
        "ring_timeout": options.ring_timeout,
        "stale_answered_timeout": options.stale_answered_timeout,
        "longest_delay": RETRY_DELAYS[-1],
        "batch_size": options.batch_size,
        "first": "-infinity",
        "last": "infinity",
        "last_ring_timeout": None,
        "last_stale_answered": None,
        "ids": no_uuids,
        **dict.fromkeys(("statuses_before", "statuses", "end_reasons"), no_texts),
        **dict.fromkeys(("ended_at", "updated_at", "durations"), no_texts),
        **dict.fromkeys(("kinds", "target_kinds", "targets", "payloads"), no_texts),
    }
