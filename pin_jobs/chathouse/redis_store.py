"""What the post-chat mail keeps in Redis: marks of dialogs without mail limits, and the operators' stores of tasks.

Nothing here is the truth. Whatever Redis does, nothing is raised: a mark that cannot be read is unknown, and a store
that cannot be written is refilled from the database at the next check.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from uuid import UUID

from pin_jobs.errors import PinJobsError

if TYPE_CHECKING:
    from redis import Redis

FORGOTTEN_FOR: Final = timedelta(minutes=10)
_OUR_MODULE: Final = "postChatMail"
# Redis itself gets less for each of its steps; this is for what has no limit of its own, such as looking up a name, or
# an answer that comes byte by byte.
_PATIENCE_SECONDS: Final = 5.0
# After it could not be reached: one check has many things to say to Redis, and would wait for it each time.
_REST_SECONDS: Final = 10.0
T = TypeVar("T")


class InvalidRedisUrl(PinJobsError):
    """The URL of Redis cannot be used; the message shows nothing of it."""

    def __init__(self) -> None:
        super().__init__(
            "the URL of Redis is not of the form redis://:password@host:6379/0, rediss://... or unix://..."
        )


class PairLike(Protocol):
    """A lady and a man; hashable."""

    @property
    def lady_db_id(self) -> int:
        """The lady's id in the database."""
        ...

    @property
    def man_ulid(self) -> str:
        """The man's ULID."""
        ...


P = TypeVar("P", bound=PairLike)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTask:
    """A task as `chathouse.operator_tasks` has it. Moments are timezone-aware."""

    id: UUID
    kind: str
    module: str
    operator_id: str
    lady_db_id: int
    man_ulid: str
    event_at: datetime
    event_trigger: str
    status: str
    created_at: datetime

    def to_json(self) -> str:
        """As the operator runner reads it; moments in UTC, to the millisecond."""
        fields = {
            "id": str(self.id),
            "kind": self.kind,
            "module": self.module,
            "operatorId": self.operator_id,
            "ladyDbId": self.lady_db_id,
            "manUlid": self.man_ulid,
            "eventAt": _moment(self.event_at),
            "eventTrigger": self.event_trigger,
            "status": self.status,
            "createdAt": _moment(self.created_at),
        }
        return json.dumps(fields, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class OperatorStore:
    """The ids in an operator's store: of all tasks, and of those of this module."""

    all_ids: frozenset[str]
    our_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Refill:
    """What `refill` changed, and the operators whose store could not be read or written."""

    added: int
    removed: int
    failed: frozenset[str]


def forgotten_key(pair: PairLike) -> str:
    """The mark of a dialog that had no mail limits left; it lives as long as that is believed."""
    return f"chathouse:checkPostChatMailDialog:{pair.lady_db_id}_{pair.man_ulid}"


def store_key(operator_id: str) -> str:
    """The operator's store, a hash of task id to JSON, and the channel on which its additions are told.

    It has no time to live: it is not ours alone, and our part of it is brought into line at every check.
    """
    return f"chathouse:operator:{operator_id}:tasks"


def connect_to_redis(url: str, *, timeout: timedelta = timedelta(seconds=2)) -> "Redis":
    """A client for `redis://`, `rediss://` (TLS) and `unix://` URLs; it connects when it is first used.

    `timeout` bounds the connecting, and the waiting for each part of an answer. A connection that turns out to be lost
    is replaced once; a server that is slow is not asked again.

    Raises:
        InvalidRedisUrl: the message shows nothing of the URL.
    """
    # A tenth of a second that a run without a use for Redis need not spend.
    from redis import Redis  # noqa: PLC0415  # see above
    from redis.backoff import NoBackoff  # noqa: PLC0415  # see above
    from redis.exceptions import ConnectionError as RedisConnectionError  # noqa: PLC0415  # see above
    from redis.retry import Retry  # noqa: PLC0415  # see above

    seconds = timeout.total_seconds()
    try:
        return Redis.from_url(
            url.strip(),
            socket_timeout=seconds,
            socket_connect_timeout=seconds,
            # The library's own default takes seconds to report a refused connection.
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            client_name="pin-jobs",
        )
    except (ValueError, TypeError):
        raise InvalidRedisUrl from None


class RedisStore:
    """The marks and the stores. `client` is `None` where the host has no Redis: everything is unknown then.

    Each failure is logged in one line, without address or password. `clock` gives seconds, for tests.
    """

    def __init__(
        self, client: "Redis | None", log: logging.Logger, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._log = log
        self._clock = clock
        self._rests_until = float("-inf")

    def forgotten(self, pairs: Iterable[P]) -> Mapping[P, bool | None]:
        """Whether each pair is marked as being without mail limits; `None` where Redis does not tell."""
        unique = list(dict.fromkeys(pairs))
        replies = self._send("marks", [("MGET", *map(forgotten_key, unique))] if unique else [])
        marks = replies[0] if replies else None
        if not isinstance(marks, list) or len(marks) != len(unique):
            return dict.fromkeys(unique, None)
        return {pair: mark is not None for pair, mark in zip(unique, marks, strict=True)}

    def forget(self, pairs: Iterable[PairLike], *, ttl: timedelta = FORGOTTEN_FOR) -> bool:
        """Mark pairs as being without mail limits, for `ttl`; whether all of them are."""
        seconds = max(1, round(ttl.total_seconds()))
        keys = dict.fromkeys(map(forgotten_key, pairs))
        return _all_done(self._send("marks", [("SET", key, "1", "EX", seconds) for key in keys]))

    def push_tasks(self, operator_id: str, tasks: Iterable[StoredTask]) -> bool:
        """Put new tasks into the operator's store and tell of them; whether that was done."""
        key = store_key(operator_id)
        commands = [
            command
            for task in tasks
            for command in (("HSET", key, str(task.id), task.to_json()), ("PUBLISH", key, task.to_json()))
        ]
        return _all_done(self._send("stores", commands))

    def read_stores(self, operator_ids: Iterable[str]) -> Mapping[str, OperatorStore | None]:
        """What is in the operators' stores, in one round trip; `None` where Redis does not tell.

        To be read before the database is asked which tasks are active: one that is here and is not active there was
        then closed, and is no new one that the database did not have yet.
        """
        unique = list(dict.fromkeys(operator_ids))
        replies = self._send("stores", [("HGETALL", store_key(operator_id)) for operator_id in unique])
        if replies is None or len(replies) != len(unique):
            return dict.fromkeys(unique, None)
        return {
            operator_id: _operator_store(reply) if isinstance(reply, dict) else None
            for operator_id, reply in zip(unique, replies, strict=True)
        }

    def refill(self, stores: Mapping[str, OperatorStore | None], active: Mapping[str, Sequence[StoredTask]]) -> Refill:
        """Bring our part of the stores into line with the database, in one round trip.

        `stores` as they were read before the database was asked, `active` our active tasks of each operator. Active
        ones that are missing are added and told of, ours that are no longer active are removed; what belongs to other
        modules, or cannot be read, is left alone.
        """
        changes = [
            (operator_id, command)
            for operator_id, store in stores.items()
            if store is not None
            for command in _changes(operator_id, store, active.get(operator_id, ()))
        ]
        replies = self._send("stores", [command for _, command in changes])
        if replies is None:
            return Refill(0, 0, frozenset(stores))
        failed = {operator_id for operator_id, store in stores.items() if store is None}
        counts = {"HSETNX": 0, "HDEL": 0, "PUBLISH": 0}
        for (operator_id, command), reply in zip(changes, replies, strict=True):
            if isinstance(reply, int):
                counts[command[0]] += reply
            else:
                failed.add(operator_id)
        return Refill(counts["HSETNX"], counts["HDEL"], frozenset(failed))

    def _send(self, what: str, commands: Sequence[tuple[Any, ...]]) -> list[Any] | None:
        """The replies to commands, sent in one round trip; an exception where one failed, `None` if all did."""
        if not commands:
            return []
        if self._client is None or self._clock() < self._rests_until:
            return None
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]  # the library's own gap
        try:
            replies = _bounded(lambda: pipeline.execute(raise_on_error=False))
        except Exception as error:  # noqa: BLE001  # whatever Redis does, the check goes on
            self._rests_until = self._clock() + _REST_SECONDS
            self._log.warning("Redis %s: %s of this check are left out", _words_of(error), what)
            return None
        faults = [reply for reply in replies if isinstance(reply, Exception)]
        if faults:
            counted = f"{len(faults)} of {len(replies)}"
            self._log.warning("Redis %s: %s commands about %s", _words_of(faults[0]), counted, what)
        return replies


def _changes(operator_id: str, store: OperatorStore, active: Sequence[StoredTask]) -> list[tuple[str, ...]]:
    key = store_key(operator_id)
    changes: list[tuple[str, ...]] = []
    for task in active:
        if str(task.id) not in store.all_ids:
            # Not over one that somebody has put there meanwhile.
            changes += [("HSETNX", key, str(task.id), task.to_json()), ("PUBLISH", key, task.to_json())]
    if closed := store.our_ids - {str(task.id) for task in active}:
        changes.append(("HDEL", key, *closed))
    return changes


def _operator_store(entries: Mapping[bytes, bytes]) -> OperatorStore:
    return OperatorStore(
        frozenset(map(_text, entries)),
        frozenset(_text(task_id) for task_id, entry in entries.items() if _is_ours(entry)),
    )


def _is_ours(entry: bytes) -> bool:
    try:
        task = json.loads(entry)
    except (ValueError, RecursionError):
        return False
    return isinstance(task, dict) and task.get("module") == _OUR_MODULE


def _all_done(replies: Sequence[Any] | None) -> bool:
    return replies is not None and not any(isinstance(reply, Exception) for reply in replies)


def _text(value: bytes) -> str:
    # Ids of ours are plain.
    return value.decode("utf-8", "replace")


def _moment(moment: datetime) -> str:
    # isoformat cuts milliseconds off and never rounds.
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _bounded(action: Callable[[], T]) -> T:
    """Run it in a thread that is left to itself when it takes too long."""
    outcomes: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def work() -> None:
        try:
            outcomes.put((action(), None))
        except Exception as error:  # noqa: BLE001  # raised again below
            outcomes.put((None, error))

    threading.Thread(target=work, name="Redis", daemon=True).start()
    try:
        result, error = outcomes.get(timeout=_PATIENCE_SECONDS)
    except Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # without an error it is a result


def _words_of(error: Exception) -> str:
    """What is wrong, without what the error itself says: that may hold an address or a value."""
    from redis import exceptions  # noqa: PLC0415  # loaded with the client, which costs time

    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
        return "does not accept the password"
    if isinstance(error, TimeoutError | exceptions.TimeoutError):
        return "does not answer in time"
    if isinstance(error, exceptions.ConnectionError | OSError):
        return "cannot be reached"
    code = re.match(r"[A-Z]{3,}\b", str(error))
    return f"refuses ({code[0] if code else type(error).__name__})"
