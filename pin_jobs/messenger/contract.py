"""What the call timeout reaper needs of a messenger database, and what it makes of one that differs.

Pure: facts in, findings out. Source: the tables of the messenger's contract and `deploy/sql/grants.sql`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final

CALLS: Final = "messenger.call_sessions"
OUTBOX: Final = "messenger.realtime_outbox"
CYCLES: Final = "pin_jobs.reaper_cycles"
QUARANTINE: Final = "pin_jobs.quarantined_calls"
REVISION: Final = "pin_jobs.alembic_version_messenger"
OURS: Final = (CYCLES, QUARANTINE, REVISION)

LEAST_VERSION: Final = 150_000
LARGEST_SKEW: Final = timedelta(seconds=1)

_TEXT: Final = frozenset({"text", "character varying", "citext"})
_MOMENT: Final = frozenset({"timestamp with time zone"})
_UUID: Final = frozenset({"uuid"})


@dataclass(frozen=True, slots=True)
class Column:
    """A column that we touch: the types with which that works, the one of the contract, and the privileges we need."""

    types: frozenset[str]
    contract: str
    needs: frozenset[str]


def _column(types: frozenset[str], contract: str, *needs: str) -> Column:
    return Column(types, contract, frozenset(needs))


_CLOSED: Final = ("SELECT", "UPDATE")
COLUMNS: Final[Mapping[str, Mapping[str, Column]]] = {
    CALLS: {
        "id": _column(_UUID, "uuid", "SELECT"),
        "caller_user_id": _column(_UUID, "uuid", "SELECT"),
        "callee_user_id": _column(_UUID, "uuid", "SELECT"),
        "media_type": _column(_TEXT, "text", "SELECT"),
        "status": _column(_TEXT, "text", *_CLOSED),
        "end_reason": _column(_TEXT, "text", *_CLOSED),
        "started_at": _column(_MOMENT, "timestamptz", "SELECT"),
        "ended_at": _column(_MOMENT, "timestamptz", *_CLOSED),
        "duration_seconds": _column(frozenset({"integer", "bigint", "smallint"}), "integer", *_CLOSED),
        "updated_at": _column(_MOMENT, "timestamptz", *_CLOSED),
    },
    OUTBOX: {
        "id": _column(_UUID, "uuid", "SELECT", "INSERT"),
        "kind": _column(_TEXT, "text", "INSERT"),
        "target_kind": _column(_TEXT, "text", "INSERT"),
        "targets": _column(frozenset({"text[]", "character varying[]"}), "text[]", "INSERT"),
        "payload": _column(frozenset({"jsonb", "json"}), "jsonb", "INSERT"),
    },
}
"""Of the host's tables, the columns that we touch."""

TABLE_PRIVILEGES: Final[Mapping[str, frozenset[str]]] = {
    CYCLES: frozenset({"SELECT", "INSERT"}),
    QUARANTINE: frozenset({"SELECT", "INSERT", "UPDATE", "DELETE"}),
    REVISION: frozenset({"SELECT"}),
}
"""Of our own tables, what the jobs may do."""


class Severity(StrEnum):
    """What a difference means: the jobs break, or they work worse than they could."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference, in one line that says what to do about it."""

    severity: Severity
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server, our role, and our session as it was given to us. `skew`: how far the worker's clock is ahead."""

    version: int
    version_name: str
    is_standby: bool
    role: str
    is_superuser: bool
    bypasses_rls: bool
    connection_limit: int
    settings: Mapping[str, timedelta]
    skew: timedelta
    is_pooled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A relation as it is; `kind` as pg_class has it, `columns` by name."""

    kind: str
    is_reachable: bool
    hides_rows: bool
    is_owned: bool
    privileges: frozenset[str]
    columns: Mapping[str, "FoundColumn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundColumn:
    """A column as it is, and what our role may do with it."""

    type: str
    is_required: bool
    has_default: bool
    is_generated: bool
    privileges: frozenset[str]


def check_server(server: Server, *, lock_ttl: timedelta, max_run_duration: timedelta) -> Iterator[Finding]:
    """The version, the role, the clock, and the limits that others set."""
    if server.version < LEAST_VERSION:
        yield _error(f"the server is PostgreSQL {server.version_name}; 15 or newer is needed")
    if server.is_standby:
        yield _error("the server is a standby, which cannot be written to: connect to the primary")
    if server.is_superuser or server.bypasses_rls:
        power = "is a superuser" if server.is_superuser else "bypasses row-level security"
        yield _warning(f"the role {server.role} {power}; deploy/sql/grants.sql makes one that may do what is needed")
    if 0 <= server.connection_limit < 5:
        yield _warning(
            f"the role {server.role} may have {server.connection_limit} connections at once; a run, the sensor and a "
            "backfill beside them need 5"
        )
    if abs(server.skew) > LARGEST_SKEW:
        direction = "ahead of" if server.skew > timedelta(0) else "behind"
        yield _warning(
            f"the clock of this machine is {abs(server.skew).total_seconds():.1f} s {direction} the server's; the "
            "server's decides, so nothing closes early or late, but the times in the UI are off: check NTP"
        )
    if server.is_pooled:
        yield _warning(
            "a pooler stands in between; that works with its transaction and session modes, not with its statement mode"
        )
    yield from _check_settings(server, lock_ttl, max_run_duration)


def _check_settings(server: Server, lock_ttl: timedelta, max_run_duration: timedelta) -> Iterator[Finding]:
    def limit(name: str) -> timedelta | None:
        return server.settings.get(name) or None

    first_statement = limit("statement_timeout")
    if first_statement and first_statement < timedelta(milliseconds=100):
        yield _error(
            f"statement_timeout of the role {server.role} is {_seconds(first_statement)}: too short for the statement "
            "that sets a cycle's own limit"
        )
    for name in ("statement_timeout", "idle_in_transaction_session_timeout", "transaction_timeout"):
        value = limit(name)
        if value and value < min(lock_ttl, max_run_duration):
            yield _warning(
                f"{name} of the role {server.role} is {_seconds(value)}; a cycle sets its own "
                f"(lock_ttl {_seconds(lock_ttl)}, max_run_duration {_seconds(max_run_duration)}), which wins"
            )
    if value := limit("lock_timeout"):
        yield _warning(
            f"lock_timeout of the role {server.role} is {_seconds(value)}: a cycle that waits that long for a lock of "
            "the host's on a whole table fails, and the next one tries again"
        )


def check_tables(tables: Mapping[str, Table]) -> Iterator[Finding]:
    """The host's tables and ours: are they there, have they our columns, and may our role do what it does?"""
    for name, columns in COLUMNS.items():
        table = tables.get(name)
        if table is None:
            yield _error(f"{name} is missing")
        elif not table.is_reachable:
            yield _error(f"USAGE on schema {name.split('.')[0]} is missing: run deploy/sql/grants.sql")
        else:
            yield from _check_table(name, table)
            yield from _check_columns(name, table, columns)
    yield from _check_additions(tables.get(OUTBOX))
    for name, privileges in TABLE_PRIVILEGES.items():
        if (table := tables.get(name)) is not None:
            yield from _check_our_table(name, table, privileges)


def _check_table(name: str, table: Table) -> Iterator[Finding]:
    if table.kind not in {"r", "p"}:
        yield _error(f"{name} is no table, so its rows cannot be locked or written as a cycle does")
    if table.hides_rows:
        yield _error(f"row-level security hides rows of {name} from our role, so a cycle refuses to run: exempt it")
    if table.is_owned:
        yield _warning(f"our role owns {name}; it needs no more than what deploy/sql/grants.sql gives")
    elif more := table.privileges & {"DELETE", "TRUNCATE"}:
        yield _warning(f"our role may {_listed(more)} {name}, and never does")


def _check_columns(name: str, table: Table, columns: Mapping[str, Column]) -> Iterator[Finding]:
    for column_name, column in columns.items():
        found = table.columns.get(column_name)
        if found is None:
            yield _error(f"{name} has no column {column_name} ({column.contract})")
            continue
        if found.type not in column.types:
            yield _error(f"{name}.{column_name} is {found.type}; it must be {column.contract}")
        if found.is_generated and column.needs & {"INSERT", "UPDATE"}:
            yield _error(f"{name}.{column_name} is generated by the database, and a cycle writes it")
        if missing := column.needs - found.privileges:
            yield _error(
                f"our role may not {_listed(missing)} column {column_name} of {name}: run deploy/sql/grants.sql"
            )


def _check_additions(outbox: Table | None) -> Iterator[Finding]:
    for name, found in (outbox.columns if outbox else {}).items():
        if name not in COLUMNS[OUTBOX] and found.is_required and not found.has_default and not found.is_generated:
            yield _error(f"{OUTBOX}.{name} is NOT NULL without a default, and a cycle knows nothing to put there")


def _check_our_table(name: str, table: Table, privileges: frozenset[str]) -> Iterator[Finding]:
    if not table.is_reachable:
        yield _error("USAGE on schema pin_jobs is missing: run deploy/sql/grants.sql")
    elif missing := privileges - table.privileges:
        yield _error(f"our role may not {_listed(missing)} {name}: run deploy/sql/grants.sql")


def check_revision(found: str | None, known: Sequence[str], tables: Mapping[str, Table]) -> Iterator[Finding]:
    """Whether the schema `pin_jobs` is the one of this version; `known` revisions oldest first."""
    for name in TABLE_PRIVILEGES:
        if found == known[-1] and name not in tables:
            yield _error(f"{name} is missing although the schema is at revision {found}: somebody dropped it")
    if found is None:
        yield _warning(
            "the schema pin_jobs is missing: calls are closed, but cycles leave no record and there is no quarantine: "
            "run `pin-jobs migrate`"
        )
    elif found not in known:
        yield _error(f"the schema pin_jobs is at revision {found}, which only a newer pin_jobs knows: install that one")
    elif found != known[-1]:
        yield _warning(
            f"the schema pin_jobs is at revision {found}, this version's is {known[-1]}: until `pin-jobs migrate` has "
            "run, cycles leave no record and there is no quarantine"
        )


def check_plans(plans: Mapping[str, str], indexes: Iterable[str]) -> Iterator[Finding]:
    """Whether the planner can find active calls through a partial index. `plans` by what they are for."""
    slow = [purpose for purpose, plan in plans.items() if f"Seq Scan on {CALLS.split('.')[1]}" in plan]
    if slow:
        there = ", ".join(indexes) or "there is none"
        yield _warning(
            f"no index serves {' and '.join(slow)} (on {CALLS}: {there}), so each look reads the whole table: CREATE "
            f"INDEX CONCURRENTLY ix_call_active ON {CALLS} (started_at) WHERE status IN ('Ringing', 'Answered')"
        )


def _error(line: str) -> Finding:
    return Finding(Severity.ERROR, line)


def _warning(line: str) -> Finding:
    return Finding(Severity.WARNING, line)


def _listed(privileges: Iterable[str]) -> str:
    return ", ".join(sorted(privileges))


def _seconds(value: timedelta) -> str:
    return f"{value.total_seconds():g} s"
