"""What the product sends to the server, recorded from an engine, and the plans that the server makes for it."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg import sql
from sqlalchemy import Connection, Engine, event

from pin_jobs.messenger.transaction import QUERIES

_BIND: Final = re.compile(r"%\((\w+)\)s")
# What the driver says of a value; what others, such as text, are it lets the server find out.
_TYPES: Final = {datetime: "timestamptz", timedelta: "interval", int: "bigint", UUID: "uuid"}


@dataclass(frozen=True)
class Statement:
    """A statement as the driver got it: with the driver's placeholders, and the values for them."""

    name: str
    text: str
    parameters: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True)
class Scan:
    """Where a plan reads a table; `index` without a `condition` is read from end to end."""

    node: str
    table: str
    index: str | None
    condition: str | None


@contextmanager
def recorded(engine: Engine) -> Iterator[list[Statement]]:
    """All statements of this engine that go through to their end, in order."""
    statements: list[Statement] = []
    started: list[float] = []

    def before(*_: Any) -> None:
        started.append(time.perf_counter())

    def after(_connection: Any, _cursor: Any, text: str, parameters: Any, context: Any, _many: bool) -> None:
        seconds = time.perf_counter() - started.pop()
        statements.append(Statement(_name(context.invoked_statement), text, dict(parameters), seconds))

    event.listen(engine, "before_cursor_execute", before)
    event.listen(engine, "after_cursor_execute", after)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", before)
        event.remove(engine, "after_cursor_execute", after)


def plan_of(
    connection: Connection, statement: Statement, *, is_generic: bool = False, is_run: bool = False
) -> dict[str, Any]:
    """The plan for these values as the driver sends them or, `is_generic`, the one that serves for all values.

    `is_run`: the statement is run too, and the plan says how many rows and pages it took.
    """
    driver: Any = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    if not is_generic:
        options = "ANALYZE, BUFFERS, FORMAT JSON" if is_run else "FORMAT JSON"
        return _json(driver.execute(f"EXPLAIN ({options}) {statement.text}", statement.parameters))
    names = list(dict.fromkeys(_BIND.findall(statement.text)))
    values = [statement.parameters[name] for name in names]
    types = f"({', '.join(_TYPES.get(type(value), 'unknown') for value in values)})" if values else ""
    numbered = _BIND.sub(lambda bind: f"${names.index(bind[1]) + 1}", statement.text)
    literals = sql.SQL("({})").format(sql.SQL(", ").join(map(sql.Literal, values))) if values else sql.SQL("")
    driver.execute("SET plan_cache_mode = force_generic_plan")
    driver.execute(f"PREPARE generic {types} AS {numbered}")
    try:
        return _json(driver.execute(sql.SQL("EXPLAIN (FORMAT JSON) EXECUTE generic {}").format(literals)))
    finally:
        driver.execute("DEALLOCATE generic")
        driver.execute("RESET plan_cache_mode")


def scans_of(plan: Mapping[str, Any]) -> Sequence[Scan]:
    """Every reading of a table in a plan."""
    return list(_scans(plan))


def _scans(node: Mapping[str, Any]) -> Iterator[Scan]:
    if "Relation Name" in node and node["Node Type"].endswith("Scan"):
        # A bitmap scan has its indexes in the nodes below it.
        indexes = list(_bitmaps(node)) if node["Node Type"] == "Bitmap Heap Scan" else [node]
        for index in indexes:
            yield Scan(node["Node Type"], node["Relation Name"], index.get("Index Name"), index.get("Index Cond"))
    for child in node.get("Plans", ()):
        yield from _scans(child)


def _bitmaps(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for child in node.get("Plans", ()):
        if child["Node Type"] == "Bitmap Index Scan":
            yield child
        elif child["Node Type"] in ("BitmapAnd", "BitmapOr"):
            yield from _bitmaps(child)


def _json(cursor: Any) -> dict[str, Any]:
    ((answer,),) = cursor.fetchall()
    return dict(answer[0]["Plan"])


def _name(statement: object) -> str:
    return next((name for name, query in QUERIES.items() if query is statement), "other")
