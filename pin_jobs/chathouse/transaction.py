"""Short transactions on the chathouse's database, and the statements that checks and sensors share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Engine, RowMapping, text

from pin_jobs.chathouse.dialogs import PAID_ACTIONS, Chat, Operator, Pair
from pin_jobs.chathouse.options import PostChatMailOptions
from pin_jobs.database import clear_errors
from pin_jobs.queries import load_queries

DATABASE: Final = "chathouse"
QUERIES: Final = {name: text(sql) for name, sql in load_queries(Path(__file__).with_name("queries.sql")).items()}
READ_TIMEOUT: Final = timedelta(seconds=20)
WRITE_TIMEOUT: Final = timedelta(seconds=10)
LOCK_TIMEOUT: Final = timedelta(seconds=5)


@contextmanager
def transaction(engine: Engine, timeout: timedelta) -> Iterator[Connection]:
    """A short transaction, bounded on the server.

    Raises:
        DatabaseUnavailable, DatabaseRefused: nothing is committed, or, when the connection broke in COMMIT, perhaps it
        is: the next check reads what is true.
    """
    with clear_errors(DATABASE), engine.begin() as connection:
        connection.execute(
            QUERIES["bound_session"], {"timeout": _milliseconds(timeout), "lock_timeout": _milliseconds(LOCK_TIMEOUT)}
        )
        yield connection


def find_operators(
    connection: Connection, operators: Sequence[str] | None = None, *, shards: int = 1, shard: int = 0
) -> tuple[datetime, list[Operator]]:
    """The database's clock, and the operators of a shard, or those that are named as far as they have a runner."""
    now = connection.scalar(QUERIES["read_clock"])
    rows = connection.execute(
        QUERIES["find_operators"],
        {"operators": None if operators is None else list(operators), "shards": shards, "shard": shard},
    )
    return now.astimezone(UTC), [Operator(**row) for row in rows.mappings()]


def find_chats(connection: Connection, operators: Sequence[str], options: PostChatMailOptions) -> list[Chat]:
    """Of all pairs of these operators, the newest paid activity that nothing is remembered about, oldest first."""
    rows = connection.execute(
        QUERIES["find_open_chats"],
        {
            "operators": list(operators),
            "actions": sorted(PAID_ACTIONS),
            "activity_window": options.activity_window,
        },
    )
    return [_chat(row) for row in rows.mappings()]


def remember(connection: Connection, chats: Sequence[Chat], reason: str) -> None:
    """Keep the keys of these activities: they were dealt with."""
    if chats:
        connection.execute(
            QUERIES["remember_closed"],
            {
                "keys": [chat.key for chat in chats],
                "event_at": [chat.happened_at for chat in chats],
                "reasons": [reason] * len(chats),
            },
        )


def _chat(row: RowMapping) -> Chat:
    return Chat(
        operator_id=row["operator_id"],
        pair=Pair(row["lady_db_id"], row["man_ulid"]),
        lady_api_id=row["lady_api_id"],
        happened_at=row["happened_at"],
        has_newer_mail=row["has_newer_mail"],
        active_task=row["active_task"],
    )


def _milliseconds(duration: timedelta) -> str:
    return str(max(1, duration // timedelta(milliseconds=1)))
