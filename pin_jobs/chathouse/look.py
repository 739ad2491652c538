"""A sensor's look at the operators: who is due, and who of them has anything to act on."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Engine

from pin_jobs.chathouse.dialogs import Operator, Outcome, decide_all, due_at, is_reserved
from pin_jobs.chathouse.options import PostChatMailOptions
from pin_jobs.chathouse.redis_store import RedisStore
from pin_jobs.chathouse.stores import refill_stores
from pin_jobs.chathouse.transaction import (
    QUERIES,
    READ_TIMEOUT,
    WRITE_TIMEOUT,
    find_chats,
    find_operators,
    remember,
    transaction,
)


@dataclass(frozen=True, slots=True)
class Look:
    """What a sensor's tick found: `requested` operators need a run; `checked_off` ones have nothing to act on."""

    now: datetime
    operators: tuple[Operator, ...]
    requested: tuple[str, ...]
    checked_off: tuple[str, ...]


def look_at_operators(engine: Engine, store: RedisStore, options: PostChatMailOptions, *, shard: int = 0) -> Look:
    """Find who is due and who of them has anything to act on; the rest are checked off on the spot.

    A few statements and one look at Redis, however many operators there are. Not restored history does no harm here: a
    task that stands for an activity counts as closed whether or not its key is remembered.

    Raises:
        DatabaseUnavailable, DatabaseRefused: the tick fails with that line, and the next one looks again.
    """
    with transaction(engine, READ_TIMEOUT) as connection:
        now, operators = find_operators(connection, shards=options.sensor_shards, shard=shard)
        due = find_due(operators, now, options)
        names = [operator.operator_id for operator in due]
        results = decide_all(find_chats(connection, names, options), now, options.silence) if due else []
    candidates = [result.chat for result in results if result.outcome is Outcome.CANDIDATE]
    marks = store.forgotten([chat.pair for chat in candidates]) if candidates else {}
    to_act_on = {chat.operator_id for chat in candidates if not marks.get(chat.pair)}
    if not due:
        return Look(now, tuple(operators), (), ())
    with transaction(engine, WRITE_TIMEOUT) as connection:
        idle = [operator for operator in due if operator.operator_id not in to_act_on]
        checked_off = connection.scalars(
            QUERIES["check_off"],
            {
                "operators": [operator.operator_id for operator in idle],
                "started_at": [operator.started_at for operator in idle],
                "last_completed": [operator.last_completed for operator in idle],
                "check_interval": options.check_interval,
                "lease_ttl": options.lease_ttl,
            },
        ).all()
        answered = [r.chat for r in results if r.outcome is Outcome.ANSWERED and r.chat.operator_id in checked_off]
        remember(connection, answered, "answered")
        requested = connection.scalars(
            QUERIES["mark_requested"], {"operators": sorted(to_act_on), "request_ttl": options.request_ttl}
        ).all()
    if checked_off:
        refill_stores(engine, store, checked_off)
    return Look(now, tuple(operators), tuple(sorted(requested)), tuple(checked_off))


def find_due(operators: Sequence[Operator], now: datetime, options: PostChatMailOptions) -> list[Operator]:
    """Who is to be checked now: due, not asked for already, and not being checked."""
    return [
        operator
        for operator in operators
        if (due := due_at(operator, options.times, now)) is not None
        and due <= now
        and not is_reserved(operator.requested_until, now, options.request_ttl)
        and not is_reserved(operator.lease_until, now, options.lease_ttl)
    ]
