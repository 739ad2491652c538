"""What the call timeout reaper needs of a messenger database, and what it makes of one that differs.

Pure: facts in, findings out. Source: the tables of the messenger's contract and `deploy/sql/grants.sql`.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Final

from pin_jobs.contract import (
    INTEGER,
    MOMENT,
    TEXT,
    UUID,
    Column,
    Contract,
    Finding,
    HostTable,
    Server,
    Severity,
    column,
    seconds,
    warning,
)

CALLS: Final = "messenger.call_sessions"
OUTBOX: Final = "messenger.realtime_outbox"
CYCLES: Final = "pin_jobs.reaper_cycles"
QUARANTINE: Final = "pin_jobs.quarantined_calls"
REVISION: Final = "pin_jobs.alembic_version_messenger"

_CLOSED: Final = ("SELECT", "UPDATE")
COLUMNS: Final[Mapping[str, Mapping[str, Column]]] = {
    CALLS: {
        "id": column(UUID, "uuid", "SELECT"),
        "caller_user_id": column(UUID, "uuid", "SELECT"),
        "callee_user_id": column(UUID, "uuid", "SELECT"),
        "media_type": column(TEXT, "text", "SELECT"),
        "status": column(TEXT, "text", *_CLOSED),
        "end_reason": column(TEXT, "text", *_CLOSED),
        "started_at": column(MOMENT, "timestamptz", "SELECT"),
        "ended_at": column(MOMENT, "timestamptz", *_CLOSED),
        "duration_seconds": column(INTEGER, "integer", *_CLOSED),
        "updated_at": column(MOMENT, "timestamptz", *_CLOSED),
    },
    OUTBOX: {
        "id": column(UUID, "uuid", "SELECT", "INSERT"),
        "kind": column(TEXT, "text", "INSERT"),
        "target_kind": column(TEXT, "text", "INSERT"),
        "targets": column(frozenset({"text[]", "character varying[]"}), "text[]", "INSERT"),
        "payload": column(frozenset({"jsonb", "json"}), "jsonb", "INSERT"),
    },
}
"""Of the host's tables, the columns that we touch."""

TABLE_PRIVILEGES: Final[Mapping[str, frozenset[str]]] = {
    CYCLES: frozenset({"SELECT", "INSERT"}),
    QUARANTINE: frozenset({"SELECT", "INSERT", "UPDATE", "DELETE"}),
    REVISION: frozenset({"SELECT"}),
}
"""Of our own tables, what the jobs may do."""

CONTRACT: Final = Contract(
    grants="deploy/sql/grants.sql",
    unit="a cycle",
    clock="nothing closes early or late",
    host={
        name: HostTable(
            columns=columns,
            unused=frozenset({"DELETE", "TRUNCATE"}),
            must_be_table=True,
            is_filled=name == OUTBOX,
        )
        for name, columns in COLUMNS.items()
    },
    ours=TABLE_PRIVILEGES,
    # Calls are closed without it, which is what matters most.
    schema_severity=Severity.WARNING,
    without_schema="the schema pin_jobs is missing: calls are closed, but cycles leave no record and there is no "
    "quarantine: run `pin-jobs migrate`",
    until_migrated="cycles leave no record and there is no quarantine",
)


def check_limits(server: Server, *, lock_ttl: timedelta, max_run_duration: timedelta) -> Iterator[Finding]:
    """The limits that others set for our role."""
    for name in ("statement_timeout", "idle_in_transaction_session_timeout", "transaction_timeout"):
        value = server.limit(name)
        if value and value < min(lock_ttl, max_run_duration):
            yield warning(
                f"{name} of the role {server.role} is {seconds(value)}; a cycle sets its own "
                f"(lock_ttl {seconds(lock_ttl)}, max_run_duration {seconds(max_run_duration)}), which wins"
            )
    if value := server.limit("lock_timeout"):
        yield warning(
            f"lock_timeout of the role {server.role} is {seconds(value)}: a cycle that waits that long for a lock of "
            "the host's on a whole table fails, and the next one tries again"
        )


def check_plans(plans: Mapping[str, str], indexes: Iterable[str]) -> Iterator[Finding]:
    """Whether the planner can find active calls through a partial index. `plans` by what they are for."""
    slow = [purpose for purpose, plan in plans.items() if f"Seq Scan on {CALLS.split('.')[1]}" in plan]
    if slow:
        there = ", ".join(indexes) or "there is none"
        yield warning(
            f"no index serves {' and '.join(slow)} (on {CALLS}: {there}), so each look reads the whole table: CREATE "
            f"INDEX CONCURRENTLY ix_call_active ON {CALLS} (started_at) WHERE status IN ('Ringing', 'Answered')"
        )
