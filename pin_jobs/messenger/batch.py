"""One cycle of the call timeout reaper: one transaction, from the run lock to the commit."""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Engine, RowMapping

from pin_jobs.database import LOCK_NAMESPACE
from pin_jobs.messenger.calls import (
    RETRY_DELAYS,
    Call,
    CallStatus,
    CallWindows,
    InconsistentCall,
    Phase,
    Transition,
    next_attempt,
    outbox_row,
    reap,
)
from pin_jobs.messenger.isolation import (
    KEPT_BY_THE_DATABASE,
    SWALLOWED_BY_THE_OUTBOX,
    Poison,
    Swallowed,
    attempt,
    write_isolated,
)
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.messenger.quarantine import QuarantinedCall, quarantined_call
from pin_jobs.messenger.transaction import CycleTransaction
from pin_jobs.moments import moment

LIVE_CYCLE_LOCK: Final = 1
# Plus the ordinal of the day: a backfill has a lock of its own, or it would take turns with the live cycle.
BACKFILL_LOCKS: Final = 1_000_000
# A backfill's batch is five hundred times an ordinary one, and nobody waits for it by the second.
BACKFILL_PATIENCE: Final = 4
# Each line is a row of Dagster's event log, written while the batch holds its locks. The table in the UI has them all.
_MOST_LOG_LINES: Final = 20
_LONGEST_ERROR: Final = 500
# Of the quarantine, in the UI; the command line shows all of it.
LONGEST_LIST: Final = 500
_CALL_COLUMNS: Final = tuple(field.name for field in fields(Call))


@dataclass(frozen=True, slots=True)
class RunLockBusy:
    """Another cycle holds the run lock. What the server hides from our role is `None`."""

    pid: int | None
    application_name: str | None
    since: datetime | None

    def __str__(self) -> str:
        if self.pid is None:
            return "another cycle held the run lock a moment ago"
        who = f"{self.application_name} (server process {self.pid})" if self.application_name else f"pid {self.pid}"
        return f"{who} holds the run lock since {moment(self.since) if self.since else 'an unknown moment'}"


@dataclass(frozen=True, slots=True)
class Claim:
    """The calls that this cycle holds, locked until its end, at the cycle's one moment `as_of`.

    Per phase: `skipped_locked`, due healthy calls that others hold; `remaining`, due healthy calls for which the batch
    had no room; `in_quarantine`, due calls whose next attempt has not come. `attempts`: of the claimed calls that are
    retries, how often each was tried before.
    """

    as_of: datetime
    windows: CallWindows
    calls: tuple[Call, ...]
    attempts: Mapping[UUID, int]
    skipped_locked: Mapping[Phase, int]
    remaining: Mapping[Phase, int]
    in_quarantine: Mapping[Phase, int]

    def overdue(self, call: Call) -> timedelta:
        """How long ago the window of this call ended."""
        return call.overdue(self.as_of, self.windows) or timedelta(0)


@dataclass(frozen=True, slots=True)
class TransitionedBatch:
    """What was decided and written to the calls.

    `poisoned` calls are out of the batch, event and all; `postponed` ones are healthy as far as anybody knows: there
    was no time to find out.
    """

    claim: Claim
    transitions: tuple[Transition, ...]
    poisoned: tuple[Poison, ...]
    postponed: tuple[Transition, ...] = ()


@dataclass(frozen=True, slots=True)
class CycleResult:
    """What one cycle committed, or in a dry run would have (seed: "Алгоритм", step 8).

    `quarantine`: the first calls of the whole quarantine, where this cycle added to it. `remaining`: due healthy calls
    that are left to the next cycle.
    """

    as_of: datetime
    closed: tuple[Transition, ...]
    poison: tuple[Poison, ...]
    quarantine: Sequence[QuarantinedCall]
    skipped_locked: Mapping[Phase, int]
    remaining: int
    duration: timedelta
    is_committed: bool

    @property
    def missed(self) -> int:
        """Calls closed in the phase `ring_timeout`."""
        return sum(transition.phase is Phase.RING_TIMEOUT for transition in self.closed)

    @property
    def failed(self) -> int:
        """Calls closed in the phase `stale_answered`."""
        return len(self.closed) - self.missed

    @property
    def poisoned(self) -> int:
        """Calls left as they are because of a fault of their own."""
        return len(self.poison)


class ReapBatch:
    """`claim`, `transition`, `write_outbox`, in this order, each once; `write_outbox` commits.

    Nothing else ever commits: `close` rolls back what is open, so an error, Terminate or the death of the process
    between any two statements leaves nothing half-done. The cycle's time is bounded on the worker's clock
    (`max_run_duration`) and on the server (`lock_ttl`).

    With a `day`, it is a backfill: it closes calls that started on that day (UTC), under the day's own run lock, as
    many as `backfill_batch_size`, and may take four times as long. A dry run does all the same and rolls back.
    """

    def __init__(  # noqa: PLR0913  # all but two by name
        self,
        engine: Engine,
        options: CallTimeoutReaperOptions,
        *,
        run_id: str,
        job_name: str,
        log: logging.Logger,
        day: date | None = None,
        is_dry_run: bool = False,
    ) -> None:
        self._engine = engine
        self._options = patient(options) if day else options
        self._run_id = run_id
        # Seen in pg_stat_activity, and so in "who holds the lock"; the server keeps 63 bytes.
        self._application_name = f"{job_name}/{run_id}"[:63]
        self._log = log
        self._day = day
        self._is_dry_run = is_dry_run
        self._transaction: CycleTransaction | None = None

    def claim(self) -> Claim | RunLockBusy:
        """Open the transaction, take the run lock and lock what is due: ringing calls first, then answered ones.

        Raises:
            DatabaseUnavailable, DatabaseRefused, CycleTooLong: nothing is held once `close` was called.
        """
        self._transaction = CycleTransaction(
            self._engine,
            self._options,
            run_id=self._run_id,
            application_name=self._application_name,
            log=self._log,
        )
        if busy := self._take_run_lock():
            self._end_transaction()
            return busy
        if not self._transaction.has_schema:
            self._log.warning(
                "the schema pin_jobs is missing or behind, so this cycle leaves no record and poison calls are tried "
                "again and again: run `pin-jobs migrate`"
            )
        as_of = self._transaction.value("read_clock").astimezone(UTC)
        self._log.info("cycle started (run %s, as of %s)", self._run_id, moment(as_of))
        return self._claim_due(as_of)

    def transition(self, claim: Claim) -> TransitionedBatch:
        """Decide on every claimed call and write the new states.

        A call that the guard or the database rejects leaves the batch.

        Raises:
            DatabaseUnavailable, DatabaseRefused, CycleTooLong: the batch is lost; `close` rolls it back.
        """
        decided, poisoned = self._decide(claim)
        self._open_transaction.run("plan_as_usual")
        self._open_transaction.run("savepoint_batch")
        settled = write_isolated(self._open_transaction, _parts(decided, claim), self._write_calls)
        return TransitionedBatch(
            claim, tuple(settled.written), (*poisoned, *settled.poisoned), tuple(settled.postponed)
        )

    def write_outbox(self, batch: TransitionedBatch) -> CycleResult:
        """Write one push intent per closed call, the quarantine and the record of the cycle, then commit.

        A call whose push intent the database rejects leaves the batch, transition and all.

        Raises:
            OutcomeUnknown: the connection broke in COMMIT and the database does not tell.
            DatabaseUnavailable, DatabaseRefused, CycleTooLong: nothing is committed.
        """
        batch = self._with_outbox_rows(batch)
        result = CycleResult(
            as_of=batch.claim.as_of,
            closed=batch.transitions,
            poison=batch.poisoned,
            quarantine=self._quarantine(batch),
            skipped_locked=batch.claim.skipped_locked,
            remaining=sum(batch.claim.remaining.values()) + len(batch.postponed),
            duration=self._open_transaction.elapsed,
            is_committed=not self._is_dry_run,
        )
        self._record(result)
        if self._is_dry_run:
            self._end_transaction()
        else:
            self._open_transaction.commit()
        self._log.info(
            "cycle completed (%s): %d missed, %d failed, %d poisoned, %d skipped locked, %d remaining, %d ms",
            "committed" if result.is_committed else "dry run, rolled back",
            result.missed,
            result.failed,
            result.poisoned,
            sum(result.skipped_locked.values()),
            result.remaining,
            result.duration / timedelta(milliseconds=1),
        )
        return result

    def close(self) -> None:
        """Roll back what is open, if anything, and end the session. A database that is gone is no error here."""
        if self._transaction is not None and self._transaction.is_open:
            self._end_transaction()
            self._log.warning("cycle rolled back: nothing of it was committed; the next cycle finds the same calls")

    @property
    def _open_transaction(self) -> CycleTransaction:
        if self._transaction is None or not self._transaction.is_open:
            raise RuntimeError("the batch has no open transaction: claim comes first, and write_outbox ends it")
        return self._transaction

    def _end_transaction(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.close()

    def _take_run_lock(self) -> RunLockBusy | None:
        job = BACKFILL_LOCKS + self._day.toordinal() if self._day else LIVE_CYCLE_LOCK
        key = {"namespace": LOCK_NAMESPACE, "job": job}
        ttl = {"lock_ttl": self._options.lock_ttl}
        transaction = self._open_transaction
        if transaction.value("try_run_lock", **key):
            return None
        holder = next(iter(transaction.rows("find_lock_holder", **key, **ttl)), None)
        if holder is None:
            return RunLockBusy(None, None, None)
        busy = RunLockBusy(holder["pid"], holder["application_name"], holder["since"])
        if holder["expired"]:
            self._log.warning("%s, longer than lock_ttl: ending that session", busy)
            transaction.run("end_expired_lock_holder", **key, **ttl)
            if transaction.value("try_run_lock", **key):
                return None
        return busy

    def _claim_due(self, as_of: datetime) -> Claim:
        transaction = self._open_transaction
        due = {
            "as_of": as_of,
            "ring_timeout": self._options.ring_timeout,
            "stale_answered_timeout": self._options.stale_answered_timeout,
            **_started_within(self._day),
        }
        limits = self._limits(due)
        quarantine = self._count_quarantine(due)
        calls: list[Call] = []
        attempts: dict[UUID, int] = {}
        last: dict[str, UUID | None] = {}
        healthy: Counter[Phase] = Counter()
        for phase in Phase:
            found = [_call(row) for row in transaction.rows(f"claim_{phase}", batch_size=limits[phase], **due)]
            last[f"last_{phase}"] = found[-1].id if len(found) == limits[phase] else None
            healthy[phase] = len(found)
            # Healthy calls first, and retries at most a tenth: poison never holds up anything but itself.
            room = min(limits[phase] - len(found), max(1, limits[phase] // 10), quarantine[phase]["retries"])
            if room:
                for row in transaction.rows(
                    f"claim_{phase}_retries", batch_size=room, longest_delay=RETRY_DELAYS[-1], **due
                ):
                    found.append(_call(row))
                    attempts[row["id"]] = row["attempts"]
            self._log.info("batch selected (phase %s, count %d)", phase, len(found))
            calls.extend(found)
        (counts,) = transaction.rows("count_due", **due, **last)
        return Claim(
            as_of=as_of,
            windows=self._options.windows,
            calls=tuple(calls),
            attempts=attempts,
            skipped_locked={p: max(0, counts[f"{p}_up_to_last"] - healthy[p]) for p in Phase},
            remaining={p: counts[p] - counts[f"{p}_up_to_last"] for p in Phase},
            in_quarantine={p: quarantine[p]["waiting"] for p in Phase},
        )

    def _limits(self, due: Mapping[str, Any]) -> Mapping[Phase, int]:
        """How many calls a phase takes: more than usual where more are due than usual."""
        options = self._options
        if self._day:
            return dict.fromkeys(Phase, options.backfill_batch_size)
        if options.catch_up_batch_size == options.batch_size:
            return dict.fromkeys(Phase, options.batch_size)
        (is_backlog,) = self._open_transaction.rows("find_backlog", batch_size=options.batch_size, **due)
        return {p: options.catch_up_batch_size if is_backlog[p] else options.batch_size for p in Phase}

    def _count_quarantine(self, due: Mapping[str, Any]) -> Mapping[Phase, Mapping[str, int]]:
        counts: dict[Phase, Mapping[str, int]] = {phase: {"retries": 0, "waiting": 0} for phase in Phase}
        if self._open_transaction.has_schema:
            rows = self._open_transaction.rows("count_quarantine", longest_delay=RETRY_DELAYS[-1], **due)
            counts.update({Phase(row["phase"]): dict(row) for row in rows})
        return counts

    @staticmethod
    def _decide(claim: Claim) -> tuple[list[Transition], list[Poison]]:
        decided: list[Transition] = []
        poisoned: list[Poison] = []
        for call in claim.calls:
            try:
                if transition := reap(call, claim.as_of, claim.windows):
                    decided.append(transition)
            except InconsistentCall as error:
                poisoned.append(Poison(call, str(error)))
        return decided, poisoned

    def _write_calls(self, part: Sequence[Transition]) -> Swallowed:
        after = [transition.after for transition in part]
        rows = self._open_transaction.rows(
            "transition_calls",
            ids=[call.id for call in after],
            statuses_before=[str(transition.before.status) for transition in part],
            statuses=[str(call.status) for call in after],
            end_reasons=[str(call.end_reason) for call in after],
            ended_at=[call.ended_at for call in after],
            updated_at=[call.updated_at for call in after],
            durations=[call.duration_seconds for call in after],
        )
        written = {row["id"] for row in rows}
        return {call.id: KEPT_BY_THE_DATABASE for call in after if call.id not in written}

    def _with_outbox_rows(self, batch: TransitionedBatch) -> TransitionedBatch:
        """Write the outbox rows; calls whose row is rejected are taken out, transition and all."""
        transaction, transitions = self._open_transaction, batch.transitions
        if not transitions or attempt(transaction, transitions, self._write_events) is None:
            return batch
        transaction.undo_batch()
        settled = write_isolated(transaction, _parts(transitions, batch.claim), self._write_calls_and_events)
        return replace(
            batch,
            transitions=tuple(settled.written),
            poisoned=(*batch.poisoned, *settled.poisoned),
            postponed=(*batch.postponed, *settled.postponed),
        )

    def _write_calls_and_events(self, part: Sequence[Transition]) -> Swallowed:
        self._open_transaction.run("defer_constraints")
        return self._write_calls(part) or self._write_events(part)

    def _write_events(self, part: Sequence[Transition]) -> Swallowed:
        intents = [outbox_row(transition.event) for transition in part]
        inserted = self._open_transaction.rows(
            "insert_outbox_rows",
            ids=[intent.id for intent in intents],
            kinds=[intent.kind for intent in intents],
            target_kinds=[intent.target_kind for intent in intents],
            targets=[json.dumps(intent.targets) for intent in intents],
            payloads=[json.dumps(dict(intent.payload)) for intent in intents],
        )
        self._open_transaction.run("check_constraints")
        missing = {intent.id: t.before.id for intent, t in zip(intents, part, strict=True)}
        for row in inserted:
            del missing[row["id"]]
        if missing:
            for row in self._open_transaction.rows("find_outbox_rows", ids=list(missing)):
                call_id = missing.pop(row["id"])
                self._log.warning("outbox row %s of call %s is there already and stays as it is", row["id"], call_id)
        return dict.fromkeys(missing.values(), SWALLOWED_BY_THE_OUTBOX)

    def _quarantine(self, batch: TransitionedBatch) -> Sequence[QuarantinedCall]:
        """Keep the poison in quarantine, remove what left its phase; the quarantine, if this cycle added to it."""
        transaction, as_of = self._open_transaction, batch.claim.as_of
        attempts = {poison.call.id: batch.claim.attempts.get(poison.call.id, 0) + 1 for poison in batch.poisoned}
        self._log_poison(batch, attempts)
        if batch.postponed:
            self._log.warning(
                "%d calls are left to the next cycle: telling poison from healthy calls took half of this one's time",
                len(batch.postponed),
            )
        if not transaction.has_schema:
            return ()
        if batch.poisoned:
            transaction.run(
                "quarantine_calls",
                as_of=as_of,
                run_id=self._run_id,
                ids=list(attempts),
                phases=[str(poison.call.phase) for poison in batch.poisoned],
                attempts=list(attempts.values()),
                errors=[poison.reason[:_LONGEST_ERROR] for poison in batch.poisoned],
                next_attempts=[next_attempt(count, as_of) for count in attempts.values()],
            )
        transaction.run("clear_quarantine")
        if not batch.poisoned:
            return ()
        return [quarantined_call(row) for row in transaction.rows("list_quarantine", at_most=LONGEST_LIST)]

    def _log_poison(self, batch: TransitionedBatch, attempts: Mapping[UUID, int]) -> None:
        for poison in batch.poisoned[:_MOST_LOG_LINES]:
            count = attempts[poison.call.id]
            outlook = f"attempt {count}, the next one at {moment(next_attempt(count, batch.claim.as_of))}"
            self._log.error(
                "item failed (call %s): %s; %s",
                poison.call.id,
                poison.reason[:_LONGEST_ERROR],
                "a dry run, which does not count" if self._is_dry_run else outlook,
            )
        if more := len(batch.poisoned[_MOST_LOG_LINES:]):
            self._log.error("%d more items failed: `pin-jobs quarantine list` has them all", more)

    def _record(self, result: CycleResult) -> None:
        if self._open_transaction.has_schema:
            self._open_transaction.run(
                "insert_cycle",
                run_id=self._run_id,
                as_of=result.as_of,
                missed=result.missed,
                failed=result.failed,
                skipped_locked_ring_timeout=result.skipped_locked[Phase.RING_TIMEOUT],
                skipped_locked_stale_answered=result.skipped_locked[Phase.STALE_ANSWERED],
                poisoned=result.poisoned,
                partition=self._day.isoformat() if self._day else None,
            )


def patient(options: CallTimeoutReaperOptions) -> CallTimeoutReaperOptions:
    """The options of a backfill: its bounds in time are wider."""
    lock_ttl = min(BACKFILL_PATIENCE * options.lock_ttl, max(options.lock_ttl, timedelta(days=1)))
    scale = lock_ttl / options.lock_ttl
    return replace(options, lock_ttl=lock_ttl, max_run_duration=scale * options.max_run_duration)


def _call(row: RowMapping) -> Call:
    values = {name: row[name] for name in _CALL_COLUMNS}
    return Call(**{**values, "status": CallStatus(row["status"])})


def _parts(transitions: Sequence[Transition], claim: Claim) -> tuple[Sequence[Transition], ...]:
    """Healthy calls apart from retries, so that a retry that fails again does not break up the rest."""
    if not claim.attempts:
        return (transitions,)
    healthy = [transition for transition in transitions if transition.before.id not in claim.attempts]
    retries = [transition for transition in transitions if transition.before.id in claim.attempts]
    return (healthy, retries)


def _started_within(day: date | None) -> Mapping[str, str]:
    """The first and the last moment at which a call may have started, both inclusive, as PostgreSQL reads them."""
    if day is None:
        return {"first": "-infinity", "last": "infinity"}
    return {"first": f"{day} 00:00:00+00", "last": f"{day} 23:59:59.999999+00"}
