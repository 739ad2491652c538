"""Brings the operators' stores in Redis in line with the database, which alone says what is true."""

from collections.abc import Sequence

from sqlalchemy import Connection, Engine

from pin_jobs.chathouse.redis_store import RedisStore, StoredTask
from pin_jobs.chathouse.transaction import QUERIES, READ_TIMEOUT, transaction


def refill_stores(engine: Engine, store: RedisStore, operators: Sequence[str]) -> None:
    """The operators' stores say what the database says of our tasks.

    Raises:
        DatabaseUnavailable, DatabaseRefused: the next check does it.
    """
    # Before the database: what is here and not active there was then closed, and is no new one.
    stores = store.read_stores(operators)
    with transaction(engine, READ_TIMEOUT) as connection:
        tasks = _active_tasks(connection, operators)
    store.refill(stores, tasks)


def _active_tasks(connection: Connection, operators: Sequence[str]) -> dict[str, list[StoredTask]]:
    """Per operator, the active tasks that this job wrote; an empty list where there is none."""
    tasks: dict[str, list[StoredTask]] = {operator: [] for operator in operators}
    for row in connection.execute(QUERIES["find_active_tasks"], {"operators": list(operators)}).mappings():
        tasks[row["operator_id"]].append(StoredTask(**row))
    return tasks
