"""What the post-chat mail keeps in Redis: marks of dialogs without mail limits, and the operators' stores of tasks.

Nothing here is the truth. Whatever Redis does, nothing is raised: a mark that cannot be read is unknown, and a store
that cannot be written is refilled from the database at the next check.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from uuid import UUID, uuid4

from pin_jobs.chathouse.redis_client import bounded, words_of

if TYPE_CHECKING:
    from redis import Redis

FORGOTTEN_FOR: Final = timedelta(minutes=10)
_MARKS: Final = "chathouse:checkPostChatMailDialog:"
_OUR_MODULE: Final = "postChatMail"
# After it could not be reached: one check has many things to say to Redis, and would wait for it each time.
_REST_SECONDS: Final = 10.0


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
    return f"{_MARKS}{pair.lady_db_id}_{pair.man_ulid}"


def store_key(operator_id: str) -> str:
    """The operator's store, a hash of task id to JSON, and the channel on which its additions are told.

    It has no time to live: it is not ours alone, and our part of it is brought into line at every check.
    """
    return f"chathouse:operator:{operator_id}:tasks"


@dataclass(frozen=True, slots=True)
class RedisFault:
    """What is wrong with Redis, in words; `is_lasting` when waiting does not help."""

    words: str
    is_lasting: bool


def find_fault(client: "Redis") -> RedisFault | None:
    """What is wrong with Redis, if anything: does it answer, take a mark with a time to live, and give it back?

    Reads and writes as the checks do, under keys that belong to no dialog and no operator. What is left is one mark,
    which is gone ten seconds later.
    """
    from redis import exceptions  # noqa: PLC0415  # loaded with the client, which costs time

    nobody = f"pin-jobs-check-{uuid4()}"
    mark, store = f"{_MARKS}{nobody}", store_key(nobody)
    pipeline = client.pipeline(transaction=False)
    for command in (("PING",), ("SET", mark, "1", "EX", 10), ("MGET", mark), ("HGETALL", store), ("HDEL", store, "x")):
        pipeline.execute_command(*command)  # type: ignore[no-untyped-call]  # the library's own gap
    try:
        replies: list[Any] = bounded(lambda: pipeline.execute(raise_on_error=False))
    except Exception as error:  # noqa: BLE001  # whatever Redis does, it is a finding
        replies = [error]
    faults = [reply for reply in replies if isinstance(reply, Exception)]
    if faults:
        lasting = (
            exceptions.AuthenticationError,
            exceptions.AuthorizationError,
            exceptions.NoPermissionError,
            exceptions.ReadOnlyError,
        )
        return RedisFault(words_of(faults[0]), isinstance(faults[0], lasting))
    return None if replies[2] == [b"1"] else RedisFault("does not give back what was written to it", is_lasting=False)


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
            replies = bounded(lambda: pipeline.execute(raise_on_error=False))
        except Exception as error:  # noqa: BLE001  # whatever Redis does, the check goes on
            self._rests_until = self._clock() + _REST_SECONDS
            self._log.warning("Redis %s: %s of this check are left out", words_of(error), what)
            return None
        faults = [reply for reply in replies if isinstance(reply, Exception)]
        if faults:
            counted = f"{len(faults)} of {len(replies)}"
            self._log.warning("Redis %s: %s commands about %s", words_of(faults[0]), counted, what)
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
