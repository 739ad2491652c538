"""What the post-chat mail needs of a chathouse database, and what it makes of one that differs.

Pure: facts in, findings out. Source: the tables of the chathouse's contract and `deploy/sql/grants_chathouse.sql`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from pin_jobs.chathouse.dialogs import MODULE, TASK_KIND
from pin_jobs.contract import (
    INTEGER,
    MOMENT,
    TEXT,
    UUID,
    Column,
    Contract,
    Finding,
    FoundIndex,
    HostTable,
    Server,
    Severity,
    Table,
    column,
    seconds,
    warning,
)

RUNNERS: Final = "chathouse.operator_runners"
LADIES: Final = "chathouse.ladies"
DIALOGS: Final = "chathouse.dialogs"
ACTIVITY: Final = "chathouse.chat_activity"
MAILS: Final = "chathouse.inmails"
TASKS: Final = "chathouse.operator_tasks"
CHECKS: Final = "pin_jobs.operator_checks"
CLOSED: Final = "pin_jobs.closed_tasks"
PAUSE: Final = "pin_jobs.dialog_api_pause"
REVISION: Final = "pin_jobs.alembic_version_chathouse"

_BOOLEAN: Final = frozenset({"boolean"})
# Blanks at the end of a char(n) are no part of what is compared or written on; ids of operators and of the API are read
# as they are, so there it would not do.
_ULID: Final = TEXT | {"character"}
_AMOUNT: Final = INTEGER | {"numeric", "real", "double precision"}
_WRITTEN: Final = ("SELECT", "INSERT")
COLUMNS: Final[Mapping[str, Mapping[str, Column]]] = {
    RUNNERS: {
        "operator_id": column(TEXT, "text", "SELECT"),
        "started_at": column(MOMENT, "timestamptz", "SELECT"),
        "stopped_at": column(MOMENT, "timestamptz", "SELECT"),
    },
    LADIES: {
        "db_id": column(INTEGER, "bigint", "SELECT"),
        "api_id": column(TEXT, "text", "SELECT"),
        "ulid": column(_ULID, "char(26)", "SELECT"),
        "operator_id": column(TEXT, "text", "SELECT"),
    },
    DIALOGS: {
        "lady_db_id": column(INTEGER, "bigint", "SELECT"),
        "man_ulid": column(_ULID, "char(26)", "SELECT"),
        "is_active": column(_BOOLEAN, "bool", "SELECT"),
        "is_favorite": column(_BOOLEAN, "bool", "SELECT"),
        "has_mail_limits": column(_BOOLEAN, "bool", "SELECT"),
    },
    ACTIVITY: {
        "lady_ulid": column(_ULID, "char(26)", "SELECT"),
        "man_ulid": column(_ULID, "char(26)", "SELECT"),
        "action": column(TEXT, "text", "SELECT"),
        "sum": column(_AMOUNT, "numeric(12,2)", "SELECT"),
        "is_free": column(_BOOLEAN, "bool", "SELECT"),
        "happened_at": column(MOMENT, "timestamptz", "SELECT"),
    },
    MAILS: {
        "lady_db_id": column(INTEGER, "bigint", "SELECT"),
        "man_ulid": column(_ULID, "char(26)", "SELECT"),
        "sent_at": column(MOMENT, "timestamptz", "SELECT"),
    },
    TASKS: {
        "id": column(UUID, "uuid", *_WRITTEN),
        "kind": column(TEXT, "text", *_WRITTEN, longest=len(TASK_KIND)),
        "module": column(TEXT, "text", *_WRITTEN, longest=len(MODULE)),
        "operator_id": column(TEXT, "text", *_WRITTEN),
        "lady_db_id": column(INTEGER, "bigint", *_WRITTEN),
        "man_ulid": column(_ULID, "char(26)", *_WRITTEN, longest=26),
        "event_at": column(MOMENT, "timestamptz", *_WRITTEN),
        "event_trigger": column(TEXT, "text", *_WRITTEN, longest=len("2026-01-31T22:54:00.120Z")),
        "status": column(TEXT, "text", *_WRITTEN, longest=len("active")),
        "created_at": column(MOMENT, "timestamptz", *_WRITTEN),
    },
}
"""Of the host's tables, the columns that we touch."""

TABLE_PRIVILEGES: Final[Mapping[str, frozenset[str]]] = {
    CHECKS: frozenset({"SELECT", "INSERT", "UPDATE"}),
    CLOSED: frozenset({"SELECT", "INSERT", "DELETE"}),
    PAUSE: frozenset({"SELECT", "INSERT", "UPDATE"}),
    REVISION: frozenset({"SELECT"}),
}
"""Of our own tables, what the jobs may do."""

CONTRACT: Final = Contract(
    grants="deploy/sql/grants_chathouse.sql",
    unit="a check",
    clock="no operator is checked early or late",
    host={
        name: HostTable(
            columns=columns,
            unused=frozenset({"UPDATE", "DELETE", "TRUNCATE"} | (set() if name == TASKS else {"INSERT"})),
            is_filled=name == TASKS,
        )
        for name, columns in COLUMNS.items()
    },
    ours=TABLE_PRIVILEGES,
    # Leases and closed keys are what keeps a chat from getting two tasks: nothing is checked without them.
    schema_severity=Severity.ERROR,
    without_schema="the schema pin_jobs has no tables of the post-chat mail, and no operator is checked without them: "
    "run `pin-jobs migrate`",
    until_migrated="operators may not be checked",
)

UNIQUE: Final[Sequence[tuple[str, str, str]]] = (
    (RUNNERS, "operator_id", "two rows of one operator fail every look at the operators"),
    (LADIES, "db_id", "two rows of one lady may give two operators a task for one chat"),
    (LADIES, "ulid", "a chat would count for every lady that has the same"),
)
"""Of the contract's keys, those whose absence would be felt: table, column, and what follows from rows that repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedIndex:
    """An index that the reads of a check live from, once the table has `least_rows`.

    Any index does that begins with the columns of one of `beginnings`; a partial one only where `may_be_partial`.
    `reads`: what would be read without it.
    """

    table: str
    name: str
    columns: str
    beginnings: Sequence[Sequence[str]]
    least_rows: int
    reads: str
    may_be_partial: bool = False


# Read once for each chat that a look finds (500 chats: a third of a second with ten thousand rows, eight with a hundred
# thousand), or once in a look.
_READ_FOR_EACH_CHAT: Final = 10_000
_READ_ONCE: Final = 100_000
INDEXES: Final = (
    WantedIndex(
        table=ACTIVITY,
        name="ix_chat_activity_pair",
        columns="lady_ulid, man_ulid, happened_at",
        beginnings=(("lady_ulid", "man_ulid"), ("lady_ulid", "happened_at")),
        least_rows=_READ_ONCE,
        reads="every look at chats, and every task that is written,",
    ),
    WantedIndex(
        table=MAILS,
        name="ix_inmails_pair",
        columns="lady_db_id, man_ulid, sent_at",
        beginnings=(("lady_db_id", "man_ulid"), ("lady_db_id", "sent_at")),
        least_rows=_READ_FOR_EACH_CHAT,
        reads="every chat that a look finds",
    ),
    WantedIndex(
        table=TASKS,
        name="ix_operator_tasks_pair",
        columns="lady_db_id, man_ulid, status",
        beginnings=(("lady_db_id", "man_ulid"),),
        least_rows=_READ_FOR_EACH_CHAT,
        reads="every chat that a look finds",
    ),
    WantedIndex(
        table=TASKS,
        name="ix_operator_tasks_operator",
        columns="operator_id, status",
        beginnings=(("operator_id",),),
        least_rows=_READ_ONCE,
        reads="every check, to fill the operators' stores,",
        may_be_partial=True,
    ),
    WantedIndex(
        table=DIALOGS,
        name="ix_dialogs_lady",
        columns="lady_db_id, man_ulid",
        beginnings=(("lady_db_id",),),
        least_rows=_READ_ONCE,
        reads="every look at chats",
    ),
    WantedIndex(
        table=LADIES,
        name="ix_ladies_operator",
        columns="operator_id",
        beginnings=(("operator_id",),),
        least_rows=_READ_ONCE,
        reads="every look at chats",
    ),
)
"""The contract names no index, so a missing one is a warning, and only where the table is large enough to matter."""


def check_limits(server: Server, *, read_timeout: timedelta, longest: timedelta) -> Iterator[Finding]:
    """The limits that others set for our role; `longest`: what any transaction of a check may take."""
    for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
        value = server.limit(name)
        if value and value < read_timeout:
            yield warning(
                f"{name} of the role {server.role} is {seconds(value)}; a check sets its own "
                f"(up to {seconds(longest)}), which wins"
            )
    # The one that a check sets nothing against, from PostgreSQL 17.
    value = server.limit("transaction_timeout")
    if value and value < longest:
        yield warning(
            f"transaction_timeout of the role {server.role} is {seconds(value)}: reading the history of a runner may "
            f"take {seconds(longest)}, and a check that needs more than it is given fails, every time: raise it"
        )


def check_indexes(tables: Mapping[str, Table], indexes: Mapping[str, Sequence[FoundIndex]]) -> Iterator[Finding]:
    """Whether the keys are unique, and whether the reads of a check can find their rows through an index."""
    for name, column_name, consequence in UNIQUE:
        is_unique = any(
            index.is_unique and index.is_usable and not index.is_partial and list(index.columns) == [column_name]
            for index in indexes[name]
        )
        # A view has no index, whatever its rows are.
        if tables[name].kind in {"r", "p"} and not is_unique:
            yield warning(f"{name}.{column_name} is neither a primary key nor unique: {consequence}")
    for wanted in INDEXES:
        rows = tables[wanted.table].rows
        if rows >= wanted.least_rows and not any(_serves(index, wanted) for index in indexes[wanted.table]):
            there = ", ".join(index.definition for index in indexes[wanted.table]) or "there is none"
            yield warning(
                f"no index on {wanted.table} begins with {' and '.join(wanted.beginnings[0])} ({there}), so "
                f"{wanted.reads} reads all of its {rows} rows: CREATE INDEX CONCURRENTLY {wanted.name} ON "
                f"{wanted.table} ({wanted.columns})"
            )


def _serves(index: FoundIndex, wanted: WantedIndex) -> bool:
    return (
        index.is_usable
        and (wanted.may_be_partial or not index.is_partial)
        and any(list(index.columns[: len(beginning)]) == list(beginning) for beginning in wanted.beginnings)
    )
