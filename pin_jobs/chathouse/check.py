"""`pin-jobs check` for a chathouse database: reads the facts, in a transaction that is rolled back, and judges them."""

import uuid
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Engine, text

from pin_jobs.catalogue import Catalogue, explain, open_catalogue, read_indexes, this_clock
from pin_jobs.chathouse.checks import LONGEST_PAUSE, RESTORE_TIMEOUT
from pin_jobs.chathouse.contract import CONTRACT, REVISION, check_indexes, check_limits
from pin_jobs.chathouse.dialogs import PAID_ACTIONS
from pin_jobs.chathouse.options import PostChatMailOptions
from pin_jobs.chathouse.transaction import DATABASE, QUERIES, READ_TIMEOUT
from pin_jobs.contract import Finding, Severity, check_revision, check_server, check_tables, errors_first, may_read
from pin_jobs.queries import load_queries

_CHECKS: Final = {name: text(sql) for name, sql in load_queries(Path(__file__).with_name("check.sql")).items()}
# What the jobs run, explained one by one: whatever the comparison with the contract overlooks shows here.
EXPLAINED: Final = {
    "find_operators": "the sensor's look at operators",
    "find_open_chats": "the look at chats",
    "find_active_tasks": "the look at active tasks",
    "find_unrestored": "the look for new runners",
    "mark_requested": "the request for a check",
    "check_off": "the end of a check that finds nothing",
    "take_leases": "the taking of leases",
    "lock_lease": "the look at leases",
    "complete_checks": "the end of a check",
    "restore_closed_keys": "the reading of a runner's history",
    "note_restored": "the note that it was read",
    "remember_closed": "the remembering of closed keys",
    "prune_closed_keys": "the pruning of closed keys",
    "create_tasks": "the insert of tasks",
    "read_pause": "the look for a pause of the dialog API",
    "write_pause": "the note of a pause of the dialog API",
}


def check_chathouse(
    engine: Engine,
    options: PostChatMailOptions,
    revisions: Sequence[str],
    *,
    worker_clock: Callable[[], datetime] = this_clock,
) -> list[Finding]:
    """Every difference between a live chathouse database and what the jobs need, errors first.

    `revisions`: those of the schema `pin_jobs`, oldest first. `worker_clock`: the clock of this machine.

    Raises:
        DatabaseUnavailable, DatabaseRefused: it cannot be reached, or not even be looked at.
    """
    with open_catalogue(engine, DATABASE, CONTRACT, worker_clock) as catalogue:
        tables = catalogue.tables
        findings = [
            *check_server(catalogue.server, CONTRACT),
            *check_limits(catalogue.server, read_timeout=READ_TIMEOUT, longest=RESTORE_TIMEOUT),
            *check_tables(tables, CONTRACT),
        ]
        if may_read(tables.get(REVISION)):
            found = catalogue.connection.scalar(_CHECKS["read_revision"])
            findings += check_revision(found, revisions, tables, CONTRACT)
        elif REVISION not in tables:
            findings += check_revision(None, revisions, tables, CONTRACT)
        # An error found already would only be found again, less clearly.
        if not any(finding.severity is Severity.ERROR for finding in findings):
            findings += _use(catalogue, options)
    return errors_first(findings)


def _use(catalogue: Catalogue, options: PostChatMailOptions) -> list[Finding]:
    """Whether the statements of the jobs work, and how they would find their rows."""
    statements = [(purpose, QUERIES[query].text) for query, purpose in EXPLAINED.items()]
    _, fault = explain(catalogue.connection, DATABASE, statements, _parameters(options))
    indexes = read_indexes(catalogue.connection, CONTRACT.host) if fault is None else {}
    return [fault] if fault else list(check_indexes(catalogue.tables, indexes))


def _parameters(options: PostChatMailOptions) -> dict[str, Any]:
    """A value of the right type for every bind of the statements that are explained."""
    nothing: list[str] = []
    return {
        **dict.fromkeys(("operators", "last_completed", "started_at"), nothing),
        **dict.fromkeys(("keys", "event_at", "reasons", "ids", "ladies", "men", "event_triggers"), nothing),
        "actions": sorted(PAID_ACTIONS),
        "operator": "",
        "token": uuid.UUID(int=0),
        "shards": options.sensor_shards,
        "shard": 0,
        "request_ttl": options.request_ttl,
        "lease_ttl": options.lease_ttl,
        "check_interval": options.check_interval,
        "history_window": options.history_window,
        "closed_key_ttl": options.closed_key_ttl,
        "activity_window": options.activity_window,
        "longest_pause": LONGEST_PAUSE,
        "pause": timedelta(0),
        "batch_size": 1,
    }
