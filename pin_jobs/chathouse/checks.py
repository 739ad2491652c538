"""A check of operators: leases, the chats that no mail followed, the dialog API's answers, tasks.

Between reading and writing lies an API call, so nothing is held open meanwhile: every transaction is short, and the one
that writes looks again at whatever forbids a task.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Engine

from pin_jobs.chathouse.dialog_api import DialogApi, DialogId, MailLimit, MailLimitAnswer, StageBounds, ask_all
from pin_jobs.chathouse.dialogs import PAID_ACTIONS, Chat, Operator, Outcome, Pair, PairResult, decide_all, task_id
from pin_jobs.chathouse.leases import LeaseLost, Leases
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
from pin_jobs.database import LOCK_NAMESPACE
from pin_jobs.errors import PinJobsError

# Beside the locks of jobs, which are numbered: here the second half of a key is the hash of a pair.
PAIR_LOCK_NAMESPACE: Final = LOCK_NAMESPACE + 1
RESTORE_TIMEOUT: Final = timedelta(seconds=60)
LONGEST_PAUSE: Final = timedelta(hours=1)


class ChecksFailed(PinJobsError):
    """Some operators could not be checked; the work of the others is done."""

    def __init__(self, failures: Mapping[str, str]) -> None:
        named = "; ".join(f"operator {operator}: {reason}" for operator, reason in failures.items())
        super().__init__(f"{len(failures)} of the operators could not be checked: {named}")
        self.failures = failures


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
        self._leases = Leases(engine, options, log)

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
        left_out = self._leases.take(operators, only_due=only_due, stopped_too=stopped_too, patience=wait_for_lease)
        failures = dict(self._restore())
        results: list[PairResult] = []
        with transaction(self._engine, READ_TIMEOUT) as connection:
            held = self._leases.locked(connection, list(self._leases.held))
            now, _ = find_operators(connection, [])
            results = decide_all(find_chats(connection, held, self._options), now, self._options.silence)
            remember(connection, [r.chat for r in results if r.outcome is Outcome.ANSWERED], "answered")
        for operator in self._leases.held.keys() - set(held):
            failures[operator] = str(LeaseLost(operator))
            del self._leases.held[operator]
        operators_held = tuple(self._leases.held[operator] for operator in held)
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
        """Give back the leases that are still held, as after a failure: the next check is due one interval from now."""
        self._leases.give_back()

    def _restore(self) -> Mapping[str, str]:
        """Read the history of runners that are checked for the first time; operators where that fails are let go."""
        failures: dict[str, str] = {}
        with transaction(self._engine, READ_TIMEOUT) as connection:
            unrestored = connection.scalars(QUERIES["find_unrestored"], {"operators": list(self._leases.held)}).all()
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
        self._leases.let_go([self._leases.held[operator] for operator in failures])
        return failures

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
            if not self._leases.locked(connection, [operator.operator_id]):
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
            self._leases.complete(connection, [operator])
        self._leases.held.pop(operator.operator_id, None)
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

    def _show(self, operators: Sequence[str]) -> None:
        """The operators' stores say what the database says. Losing Redis loses no task, so nothing fails here."""
        if not operators:
            return
        try:
            refill_stores(self._engine, self._store, operators)
        except PinJobsError as error:
            self._log.warning("the operators' stores are not refilled, the next check does it: %s", error)
