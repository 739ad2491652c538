"""A check of operators: leases, the chats that no mail followed, the dialog API's answers, tasks.

Between reading and writing lies an API call, so nothing is held open meanwhile: every transaction is short, and the one
that writes looks again at whatever forbids a task.
"""

import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, RowMapping, text

from pin_jobs.chathouse.dialog_api import DialogApi, DialogId, MailLimit, MailLimitAnswer, StageBounds, ask_all
from pin_jobs.chathouse.dialogs import (
    PAID_ACTIONS,
    Chat,
    Operator,
    Outcome,
    Pair,
    decide,
    due_at,
    is_reserved,
    task_id,
)
from pin_jobs.chathouse.options import PostChatMailOptions
from pin_jobs.chathouse.redis_store import RedisStore, StoredTask
from pin_jobs.database import LOCK_NAMESPACE, clear_errors
from pin_jobs.errors import PinJobsError
from pin_jobs.queries import load_queries

DATABASE: Final = "chathouse"
QUERIES: Final = {name: text(sql) for name, sql in load_queries(Path(__file__).with_name("queries.sql")).items()}
# Beside the locks of jobs, which are numbered: here the second half of a key is the hash of a pair.
PAIR_LOCK_NAMESPACE: Final = LOCK_NAMESPACE + 1
READ_TIMEOUT: Final = timedelta(seconds=20)
WRITE_TIMEOUT: Final = timedelta(seconds=10)
RESTORE_TIMEOUT: Final = timedelta(seconds=60)
LOCK_TIMEOUT: Final = timedelta(seconds=5)
LONGEST_PAUSE: Final = timedelta(hours=1)
_LEASE_INTERVAL: Final = 0.5
_BUSY: Final = "somebody else checks it"


class ChecksFailed(PinJobsError):
    """Some operators could not be checked; the work of the others is done."""

    def __init__(self, failures: Mapping[str, str]) -> None:
        named = "; ".join(f"operator {operator}: {reason}" for operator, reason in failures.items())
        super().__init__(f"{len(failures)} of the operators could not be checked: {named}")
        self.failures = failures


class LeaseLost(PinJobsError):
    """A check took longer than its lease; somebody else may be at work for the operator, so nothing is written."""

    def __init__(self, operator_id: str) -> None:
        super().__init__(
            f"the lease of operator {operator_id} ran out; nothing was written, and the next check finds the same chats"
        )


@dataclass(frozen=True, slots=True)
class PairResult:
    """What became of one pair, and a word on why."""

    chat: Chat
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """The operators that this run holds, what was found out about their pairs so far, and who was left out, and why."""

    operators: tuple[Operator, ...]
    results: tuple[PairResult, ...]
    left_out: Mapping[str, str]
    failures: Mapping[str, str]

    def of(self, outcome: Outcome) -> list[Chat]:
        """The chats with this outcome."""
        return [result.chat for result in self.results if result.outcome is outcome]

    def counts(self, operator_id: str | None = None) -> Mapping[Outcome, int]:
        """Pairs by outcome, of one operator or of all."""
        return Counter(r.outcome for r in self.results if operator_id in (None, r.chat.operator_id))


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


def decide_chats(chats: Sequence[Chat], now: datetime, options: PostChatMailOptions) -> list[PairResult]:
    """What the database alone decides about each."""
    return [PairResult(chat, decide(chat, now, options.silence), chat.active_task or "") for chat in chats]


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


def active_tasks(connection: Connection, operators: Sequence[str]) -> dict[str, list[StoredTask]]:
    """Per operator, the active tasks that this job wrote; an empty list where there is none."""
    tasks: dict[str, list[StoredTask]] = {operator: [] for operator in operators}
    for row in connection.execute(QUERIES["find_active_tasks"], {"operators": list(operators)}).mappings():
        tasks[row["operator_id"]].append(StoredTask(**row))
    return tasks


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
        results = decide_chats(find_chats(connection, names, options), now, options) if due else []
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


def refill_stores(engine: Engine, store: RedisStore, operators: Sequence[str]) -> None:
    """The operators' stores say what the database says of our tasks.

    Raises:
        DatabaseUnavailable, DatabaseRefused: the next check does it.
    """
    # Before the database: what is here and not active there was then closed, and is no new one.
    stores = store.read_stores(operators)
    with transaction(engine, READ_TIMEOUT) as connection:
        tasks = active_tasks(connection, operators)
    store.refill(stores, tasks)


class OperatorChecks:
    """`find_candidates`, `check_mail_limits`, `create_tasks`, in this order, each once; `close` gives back leases.

    `wait_for_lease`: how long an operator that somebody else checks is waited for. `only_due`: operators that are not
    due by now are left out, as a request that came late or twice would have it.
    """

    def __init__(  # noqa: PLR0913  # all but two by name
        self,
        engine: Engine,
        options: PostChatMailOptions,
        *,
        api: DialogApi,
        bounds: StageBounds,
        store: RedisStore,
        log: logging.Logger,
    ) -> None:
        self._engine = engine
        self._options = options
        self._api = api
        self._bounds = bounds
        self._store = store
        self._log = log
        self._token = uuid.uuid4()
        self._held: dict[str, Operator] = {}

    def find_candidates(
        self,
        operators: Sequence[str] | None,
        *,
        only_due: bool = False,
        stopped_too: bool = False,
        wait_for_lease: timedelta = timedelta(0),
    ) -> Checked:
        """Take the leases, read the history of new runners, and find the chats that no mail followed.

        Raises:
            DatabaseUnavailable, DatabaseRefused: nothing was checked.
        """
        left_out = self._take_leases(operators, only_due=only_due, stopped_too=stopped_too, patience=wait_for_lease)
        failures = dict(self._restore())
        results: list[PairResult] = []
        with transaction(self._engine, READ_TIMEOUT) as connection:
            held = self._locked(connection, list(self._held))
            now, _ = find_operators(connection, [])
            results = decide_chats(find_chats(connection, held, self._options), now, self._options)
            remember(connection, [r.chat for r in results if r.outcome is Outcome.ANSWERED], "answered")
        for operator in self._held.keys() - set(held):
            failures[operator] = str(LeaseLost(operator))
            del self._held[operator]
        operators_held = tuple(self._held[operator] for operator in held)
        self._log.info("%d operators, %d pairs with a chat that nothing is remembered about", len(held), len(results))
        return Checked(operators_held, tuple(results), left_out, failures)

    def check_mail_limits(self, checked: Checked) -> Checked:
        """Ask Redis, then the dialog API, whether the lady may still write; pairs that may not are left alone a while.

        What cannot be found out in time is `UNKNOWN`: no task, and asked again at the next check.
        """
        candidates = checked.of(Outcome.CANDIDATE)
        marks = self._store.forgotten([chat.pair for chat in candidates]) if candidates else {}
        to_ask = [chat for chat in candidates if not marks.get(chat.pair)]
        answers = self._ask(to_ask) if to_ask else {}
        limited = [chat.pair for chat in to_ask if answers[chat.pair].limit is MailLimit.LIMITED]
        if limited:
            self._store.forget(limited, ttl=self._options.forgotten_ttl)
        results = [
            self._with_answer(result, answers) if result.outcome is Outcome.CANDIDATE else result
            for result in checked.results
        ]
        return replace(checked, results=tuple(results))

    def create_tasks(self, checked: Checked) -> Checked:
        """Write the tasks, one short transaction per operator, and show them in the operators' stores.

        One operator's failure leaves the others' work done: it is in `failures`, and its chats stay candidates.
        """
        failures = dict(checked.failures)
        overtaken: dict[Pair, str] = {}
        created: set[Pair] = set()
        for operator in checked.operators:
            chats = [c for c in checked.of(Outcome.CANDIDATE) if c.operator_id == operator.operator_id]
            try:
                written = self._write_tasks(operator, chats)
            except PinJobsError as error:
                failures[operator.operator_id] = str(error)
                self._log.error("operator %s could not be checked: %s", operator.operator_id, error)
                continue
            created |= written
            overtaken |= {c.pair: "something came in between" for c in chats if c.pair not in written}
        self._show([operator.operator_id for operator in checked.operators])
        results = []
        for result in checked.results:
            if result.chat.pair in created:
                results.append(PairResult(result.chat, Outcome.CREATED, str(task_id(result.chat))))
            elif result.chat.pair in overtaken:
                results.append(PairResult(result.chat, Outcome.OVERTAKEN, overtaken[result.chat.pair]))
            else:
                results.append(result)
        return replace(checked, results=tuple(results), failures=failures)

    def close(self) -> None:
        """Give back the leases that are still held, as after a failure: the next check is due one interval from now.

        A database that is gone is no error here: a lease runs out by itself.
        """
        if not self._held:
            return
        try:
            with transaction(self._engine, WRITE_TIMEOUT) as connection:
                self._complete(connection, list(self._held.values()))
        except PinJobsError as error:
            self._log.warning("leases are not given back, they run out by themselves: %s", error)
        self._held.clear()

    def _take_leases(
        self, operators: Sequence[str] | None, *, only_due: bool, stopped_too: bool, patience: timedelta
    ) -> Mapping[str, str]:
        give_up = time.monotonic() + patience.total_seconds()
        while True:
            left_out = self._try_leases(operators, only_due=only_due, stopped_too=stopped_too)
            busy = [operator for operator, reason in left_out.items() if reason.startswith(_BUSY)]
            if not busy or time.monotonic() >= give_up:
                break
            time.sleep(_LEASE_INTERVAL)
        for operator, reason in left_out.items():
            self._log.warning("operator %s is left out: %s", operator, reason)
        return left_out

    def _try_leases(self, operators: Sequence[str] | None, *, only_due: bool, stopped_too: bool) -> Mapping[str, str]:
        left_out: dict[str, str] = {}
        wanted: list[Operator] = []
        with transaction(self._engine, READ_TIMEOUT) as connection:
            now, found = find_operators(connection, operators)
            known = {operator.operator_id for operator in found}
            left_out |= {name: "it has no runner" for name in operators or () if name not in known}
            for operator in found:
                if operator.operator_id in self._held:
                    continue
                if reason := self._reason_to_leave_out(operator, now, only_due=only_due, stopped_too=stopped_too):
                    # Nobody asked for those that are merely stopped.
                    if operators is not None or operator.is_running:
                        left_out[operator.operator_id] = reason
                else:
                    wanted.append(operator)
            taken = set(
                connection.scalars(
                    QUERIES["take_leases"],
                    {
                        "operators": [operator.operator_id for operator in wanted],
                        "last_completed": [operator.last_completed for operator in wanted],
                        "token": self._token,
                        "lease_ttl": self._options.lease_ttl,
                    },
                )
            )
        for operator in wanted:
            if operator.operator_id in taken:
                self._held[operator.operator_id] = operator
            else:
                left_out[operator.operator_id] = f"{_BUSY}, and was first"
        return left_out

    def _reason_to_leave_out(
        self, operator: Operator, now: datetime, *, only_due: bool, stopped_too: bool
    ) -> str | None:
        if not operator.is_running and not stopped_too:
            return "its runner has stopped"
        if is_reserved(operator.lease_until, now, self._options.lease_ttl):
            return f"{_BUSY} until {operator.lease_until:%H:%M:%S} at the latest"
        due = due_at(operator, self._options.times, now)
        if only_due and (due is None or due > now):
            return "it was checked in the meantime"
        return None

    def _restore(self) -> Mapping[str, str]:
        """Read the history of runners that are checked for the first time; operators where that fails are let go."""
        failures: dict[str, str] = {}
        with transaction(self._engine, READ_TIMEOUT) as connection:
            unrestored = connection.scalars(QUERIES["find_unrestored"], {"operators": list(self._held)}).all()
        for operator in unrestored:
            try:
                with transaction(self._engine, RESTORE_TIMEOUT) as connection:
                    connection.execute(
                        QUERIES["restore_closed_keys"],
                        {
                            "operator": operator,
                            "history_window": self._options.history_window,
                            "closed_key_ttl": self._options.closed_key_ttl,
                        },
                    )
                    connection.execute(QUERIES["note_restored"], {"operator": operator})
            except PinJobsError as error:
                failures[operator] = f"its history could not be read: {error}"
                self._log.error("operator %s could not be checked: %s", operator, failures[operator])
        self._let_go([self._held[operator] for operator in failures])
        return failures

    def _locked(self, connection: Connection, operators: Sequence[str]) -> list[str]:
        held = connection.scalars(QUERIES["lock_lease"], {"operators": list(operators), "token": self._token})
        return list(held)

    def _ask(self, chats: Sequence[Chat]) -> Mapping[Pair, MailLimitAnswer]:
        pause = self._pause()
        if pause is not None:
            reason = f"the dialog API asked to be left alone until {pause:%H:%M:%S}"
            return {chat.pair: MailLimitAnswer(MailLimit.UNKNOWN, reason) for chat in chats}
        dialogs = {chat.pair: DialogId(chat.lady_api_id, chat.pair.man_ulid) for chat in chats}
        answers = ask_all(self._api, dialogs.values(), self._bounds, self._log)
        pauses = [answer.paused_for for answer in answers.values() if answer.paused_for is not None]
        if pauses:
            with transaction(self._engine, WRITE_TIMEOUT) as connection:
                connection.execute(QUERIES["write_pause"], {"pause": min(max(pauses), LONGEST_PAUSE)})
        return {pair: answers[dialog] for pair, dialog in dialogs.items()}

    def _pause(self) -> datetime | None:
        with transaction(self._engine, READ_TIMEOUT) as connection:
            until: datetime | None = connection.scalar(QUERIES["read_pause"], {"longest_pause": LONGEST_PAUSE})
            return until

    @staticmethod
    def _with_answer(result: PairResult, answers: Mapping[Pair, MailLimitAnswer]) -> PairResult:
        answer = answers.get(result.chat.pair)
        if answer is None:
            return replace(result, outcome=Outcome.FORGOTTEN, detail="no mail limits a while ago")
        if answer.limit is MailLimit.ALLOWED:
            return result
        outcome = Outcome.NO_LIMITS if answer.limit is MailLimit.LIMITED else Outcome.UNKNOWN
        return replace(result, outcome=outcome, detail=answer.reason)

    def _write_tasks(self, operator: Operator, chats: Sequence[Chat]) -> set[Pair]:
        """One operator's tasks, their keys and the end of its check, together; the pairs that have a new task."""
        with transaction(self._engine, WRITE_TIMEOUT) as connection:
            if not self._locked(connection, [operator.operator_id]):
                raise LeaseLost(operator.operator_id)
            written: set[Pair] = set()
            if chats:
                connection.execute(
                    QUERIES["lock_pairs"],
                    {"namespace": PAIR_LOCK_NAMESPACE, "pairs": [str(chat.pair) for chat in chats]},
                )
                rows = connection.execute(QUERIES["create_tasks"], self._wanted(operator, chats)).mappings()
                written = {Pair(row["lady_db_id"], row["man_ulid"]) for row in rows}
                remember(connection, [chat for chat in chats if chat.pair in written], "created")
            self._complete(connection, [operator])
        self._held.pop(operator.operator_id, None)
        return written

    @staticmethod
    def _wanted(operator: Operator, chats: Sequence[Chat]) -> dict[str, Any]:
        return {
            "operator": operator.operator_id,
            "actions": sorted(PAID_ACTIONS),
            "ids": [task_id(chat) for chat in chats],
            "ladies": [chat.pair.lady_db_id for chat in chats],
            "men": [chat.pair.man_ulid for chat in chats],
            "event_at": [chat.happened_at for chat in chats],
            "event_triggers": [chat.moment for chat in chats],
            "keys": [chat.key for chat in chats],
        }

    def _complete(self, connection: Connection, operators: Sequence[Operator]) -> None:
        connection.execute(
            QUERIES["complete_checks"],
            {
                "operators": [operator.operator_id for operator in operators],
                "started_at": [operator.started_at for operator in operators],
                "token": self._token,
                "check_interval": self._options.check_interval,
            },
        )

    def _let_go(self, operators: Sequence[Operator]) -> None:
        if operators:
            with transaction(self._engine, WRITE_TIMEOUT) as connection:
                self._complete(connection, operators)
            for operator in operators:
                self._held.pop(operator.operator_id, None)

    def _show(self, operators: Sequence[str]) -> None:
        """The operators' stores say what the database says. Losing Redis loses no task, so nothing fails here."""
        if not operators:
            return
        try:
            refill_stores(self._engine, self._store, operators)
        except PinJobsError as error:
            self._log.warning("the operators' stores are not refilled, the next check does it: %s", error)


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
