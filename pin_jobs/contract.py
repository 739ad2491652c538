"""What a database of a host must have, and what to make of one that differs: what all contexts have in common.

Pure: facts in, findings out. Each context states its own `Contract`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final

LEAST_VERSION: Final = 150_000
LARGEST_SKEW: Final = timedelta(seconds=1)
LEAST_CONNECTIONS: Final = 5
_SHORTEST_STATEMENT: Final = timedelta(milliseconds=100)

TEXT: Final = frozenset({"text", "character varying", "citext"})
MOMENT: Final = frozenset({"timestamp with time zone"})
UUID: Final = frozenset({"uuid"})
INTEGER: Final = frozenset({"integer", "bigint", "smallint"})


class Severity(StrEnum):
    """What a difference means: the jobs break, or they work worse than they could."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference, in one line that says what to do about it."""

    severity: Severity
    line: str


def error(line: str) -> Finding:
    """Something that breaks the jobs."""
    return Finding(Severity.ERROR, line)


def warning(line: str) -> Finding:
    """Something with which the jobs work worse than they could."""
    return Finding(Severity.WARNING, line)


def errors_first(findings: Iterable[Finding]) -> list[Finding]:
    """In the same order otherwise."""
    return sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR)


@dataclass(frozen=True, slots=True)
class Column:
    """A column that we touch: the types with which that works, the one of the contract, and the privileges we need.

    `longest`: of what we write there, in characters, where that is known.
    """

    types: frozenset[str]
    contract: str
    needs: frozenset[str]
    longest: int = 0


def column(types: frozenset[str], contract: str, *needs: str, longest: int = 0) -> Column:
    """A `Column`, with the privileges one by one."""
    return Column(types, contract, frozenset(needs), longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTable:
    """A table of the host: the columns that we touch, and the privileges on all of it that no job uses.

    `must_be_table`: a view in its place would not do. `is_filled`: rows are added to it, so a column that we do not
    know must not ask for a value.
    """

    columns: Mapping[str, Column]
    unused: frozenset[str]
    must_be_table: bool = False
    is_filled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What a context needs of its database, and its own words for what follows where that is not there.

    `unit`: what the context does in one go, "a cycle". `clock`: what comes of a clock that is off, or rather does not.
    `ours`: the tables in the schema pin_jobs, with the privileges that the jobs need. `without_schema`: the line for a
    database that was never migrated; `until_migrated`: what follows while it is behind; `schema_severity`: how grave
    both are.
    """

    grants: str
    unit: str
    clock: str
    host: Mapping[str, HostTable]
    ours: Mapping[str, frozenset[str]]
    schema_severity: Severity
    without_schema: str
    until_migrated: str


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

    def limit(self, name: str) -> timedelta | None:
        """A time limit of the session; `None` where there is none."""
        return self.settings.get(name) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A relation as it is; `kind` as pg_class has it, `rows` as the statistics have it, `columns` by name."""

    kind: str
    is_reachable: bool
    hides_rows: bool
    is_owned: bool
    rows: int
    privileges: frozenset[str]
    columns: Mapping[str, "FoundColumn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundColumn:
    """A column as it is, and what our role may do with it. `length`: of its texts at most, if that is bounded."""

    type: str
    length: int | None
    is_required: bool
    has_default: bool
    is_generated: bool
    privileges: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundIndex:
    """An index as it is; of its `columns` those that are searched by, in order, with "" for an expression.

    `definition`: for people, and it says when the index is invalid.
    """

    definition: str
    columns: Sequence[str]
    is_usable: bool
    is_unique: bool
    is_partial: bool


def check_server(server: Server, contract: Contract) -> Iterator[Finding]:
    """The version, the role, the clock, and what stands in between."""
    if server.version < LEAST_VERSION:
        yield error(f"the server is PostgreSQL {server.version_name}; 15 or newer is needed")
    if server.is_standby:
        yield error("the server is a standby, which cannot be written to: connect to the primary")
    if server.is_superuser or server.bypasses_rls:
        power = "is a superuser" if server.is_superuser else "bypasses row-level security"
        yield warning(f"the role {server.role} {power}; {contract.grants} makes one that may do what is needed")
    if 0 <= server.connection_limit < LEAST_CONNECTIONS:
        yield warning(
            f"the role {server.role} may have {server.connection_limit} connections at once; a run, the sensor and a "
            f"backfill beside them need {LEAST_CONNECTIONS}"
        )
    if abs(server.skew) > LARGEST_SKEW:
        direction = "ahead of" if server.skew > timedelta(0) else "behind"
        yield warning(
            f"the clock of this machine is {abs(server.skew).total_seconds():.1f} s {direction} the server's; the "
            f"server's decides, so {contract.clock}, but the times in the UI are off: check NTP"
        )
    if server.is_pooled:
        yield warning(
            "a pooler stands in between; that works with its transaction and session modes, not with its statement mode"
        )
    shortest = server.limit("statement_timeout")
    if shortest and shortest < _SHORTEST_STATEMENT:
        yield error(
            f"statement_timeout of the role {server.role} is {seconds(shortest)}: too short for the statement "
            f"that sets {contract.unit}'s own limit"
        )


def check_tables(tables: Mapping[str, Table], contract: Contract) -> Iterator[Finding]:
    """The host's tables and ours: are they there, have they our columns, and may our role do what it does?"""
    for name, wanted in contract.host.items():
        table = tables.get(name)
        if table is None:
            yield error(f"{name} is missing")
        elif not table.is_reachable:
            yield error(f"USAGE on schema {name.split('.')[0]} is missing: run {contract.grants}")
        else:
            yield from _check_table(name, table, wanted, contract)
            yield from _check_columns(name, table, wanted, contract)
    for name, wanted in contract.host.items():
        if wanted.is_filled and name in tables:
            yield from _check_additions(name, tables[name], wanted, contract)
    for name, privileges in contract.ours.items():
        if (table := tables.get(name)) is not None:
            yield from _check_our_table(name, table, privileges, contract)


def _check_table(name: str, table: Table, wanted: HostTable, contract: Contract) -> Iterator[Finding]:
    if wanted.must_be_table and table.kind not in {"r", "p"}:
        yield error(f"{name} is no table, so its rows cannot be locked or written as {contract.unit} does")
    if table.hides_rows:
        yield error(
            f"row-level security hides rows of {name} from our role, so {contract.unit} refuses to run: exempt it"
        )
    if table.is_owned:
        yield warning(f"our role owns {name}; it needs no more than what {contract.grants} gives")
    elif more := table.privileges & wanted.unused:
        yield warning(f"our role may {listed(more)} {name}, and never does")


def _check_columns(name: str, table: Table, wanted: HostTable, contract: Contract) -> Iterator[Finding]:
    for column_name, needed in wanted.columns.items():
        found = table.columns.get(column_name)
        if found is None:
            yield error(f"{name} has no column {column_name} ({needed.contract})")
            continue
        if found.type not in needed.types:
            yield error(f"{name}.{column_name} is {found.type}; it must be {needed.contract}")
        elif found.length is not None and found.length < needed.longest:
            yield error(
                f"{name}.{column_name} takes {found.length} characters, and {contract.unit} writes {needed.longest}"
            )
        if found.is_generated and needed.needs & {"INSERT", "UPDATE"}:
            yield error(f"{name}.{column_name} is generated by the database, and {contract.unit} writes it")
        if missing := needed.needs - found.privileges:
            yield error(f"our role may not {listed(missing)} column {column_name} of {name}: run {contract.grants}")


def _check_additions(name: str, table: Table, wanted: HostTable, contract: Contract) -> Iterator[Finding]:
    for column_name, found in table.columns.items():
        if column_name in wanted.columns or not found.is_required:
            continue
        if not found.has_default and not found.is_generated:
            yield error(
                f"{name}.{column_name} is NOT NULL without a default, and {contract.unit} knows nothing to put there"
            )


def _check_our_table(name: str, table: Table, privileges: frozenset[str], contract: Contract) -> Iterator[Finding]:
    if not table.is_reachable:
        yield error(f"USAGE on schema pin_jobs is missing: run {contract.grants}")
    elif missing := privileges - table.privileges:
        yield error(f"our role may not {listed(missing)} {name}: run {contract.grants}")


def check_revision(
    found: str | None, known: Sequence[str], tables: Mapping[str, Table], contract: Contract
) -> Iterator[Finding]:
    """Whether the schema `pin_jobs` is the one of this version; `known` revisions oldest first."""
    for name in contract.ours:
        if found == known[-1] and name not in tables:
            yield error(f"{name} is missing although the schema is at revision {found}: somebody dropped it")
    if found is None:
        yield Finding(contract.schema_severity, contract.without_schema)
    elif found not in known:
        yield error(f"the schema pin_jobs is at revision {found}, which only a newer pin_jobs knows: install that one")
    elif found != known[-1]:
        yield Finding(
            contract.schema_severity,
            f"the schema pin_jobs is at revision {found}, this version's is {known[-1]}: until `pin-jobs migrate` has "
            f"run, {contract.until_migrated}",
        )


def may_read(table: Table | None) -> bool:
    """Whether the whole table is there and may be read."""
    return table is not None and table.is_reachable and "SELECT" in table.privileges


def listed(names: Iterable[str]) -> str:
    """For people, in the order of the alphabet."""
    return ", ".join(sorted(names))


def seconds(value: timedelta) -> str:
    """For people."""
    return f"{value.total_seconds():g} s"
