"""`pin-jobs check` for a messenger database: reads the facts, in a transaction that is rolled back, and judges them."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from pin_jobs.catalogue import explain, open_catalogue, read_indexes, this_clock
from pin_jobs.contract import Finding, Severity, check_revision, check_server, check_tables, errors_first, may_read
from pin_jobs.messenger.calls import RETRY_DELAYS
from pin_jobs.messenger.contract import CALLS, CONTRACT, CYCLES, QUARANTINE, REVISION, check_limits, check_plans
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.messenger.transaction import DATABASE, QUERIES, QUERIES_WITHOUT_SCHEMA
from pin_jobs.queries import load_queries

_CHECKS: Final = {name: text(sql) for name, sql in load_queries(Path(__file__).with_name("check.sql")).items()}
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
    worker_clock: Callable[[], datetime] = this_clock,
) -> list[Finding]:
    """Every difference between a live messenger database and what the jobs need, errors first.

    `revisions`: those of the schema `pin_jobs`, oldest first. `worker_clock`: the clock of this machine.

    Raises:
        DatabaseUnavailable, DatabaseRefused: it cannot be reached, or not even be looked at.
    """
    with open_catalogue(engine, DATABASE, CONTRACT, worker_clock) as catalogue:
        connection, server, tables = catalogue.connection, catalogue.server, catalogue.tables
        findings = [
            *check_server(server, CONTRACT),
            *check_limits(server, lock_ttl=options.lock_ttl, max_run_duration=options.max_run_duration),
            *check_tables(tables, CONTRACT),
        ]
        if may_read(tables.get(REVISION)):
            findings += check_revision(connection.scalar(_CHECKS["read_revision"]), revisions, tables, CONTRACT)
        elif REVISION not in tables:
            findings += check_revision(None, revisions, tables, CONTRACT)
        # An error found already would only be found again, less clearly.
        if not any(finding.severity is Severity.ERROR for finding in findings):
            findings += _explain(connection, options, has_schema={CYCLES, QUARANTINE} <= tables.keys())
    return errors_first(findings)


def _explain(connection: Connection, options: CallTimeoutReaperOptions, *, has_schema: bool) -> list[Finding]:
    connection.execute(_CHECKS["avoid_seq_scans"])
    queries = QUERIES if has_schema else QUERIES_WITHOUT_SCHEMA
    statements = [(purpose, queries[query].text) for query, purpose in _EXPLAINED.items()]
    plans, fault = explain(connection, DATABASE, statements, _parameters(options))
    if fault:
        return [fault]
    looks = {_EXPLAINED[query]: plans[_EXPLAINED[query]] for query in _LOOKS}
    indexes = read_indexes(connection, [CALLS])[CALLS]
    return list(check_plans(looks, [index.definition for index in indexes]))


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
