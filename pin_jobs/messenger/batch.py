"""One cycle of the call timeout reaper: one transaction, from the run lock to the commit."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Engine, RowMapping

from pin_jobs.database import LOCK_NAMESPACE
from pin_jobs.errors import PinJobsError
from pin_jobs.messenger.calls import (
    Call,
    CallStatus,
    CallWindows,
    InconsistentCall,
    Phase,
    Transition,
    outbox_row,
    reap,
)
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.messenger.transaction import CycleTransaction

LIVE_CYCLE_LOCK: Final = 1


class OutboxRowLost(PinJobsError):
    """A trigger of the host swallowed an outbox row; without it the transition must not commit."""


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
    """The calls that this cycle holds, locked until its end, at the cycle's one moment `as_of`."""

    as_of: datetime
    windows: CallWindows
    calls: tuple[Call, ...]
    skipped_locked: Mapping[Phase, int]

    def overdue(self, call: Call) -> timedelta:
        """How long ago the window of this call ended."""
        return call.overdue(self.as_of, self.windows) or timedelta(0)


@dataclass(frozen=True, slots=True)
class Poison:
    """A call that stays as it is because of a fault of its own."""

    call: Call
    reason: str


@dataclass(frozen=True, slots=True)
class TransitionedBatch:
    """What was decided and written to the calls; `poisoned` calls are out of the batch, event and all."""

    claim: Claim
    transitions: tuple[Transition, ...]
    poisoned: tuple[Poison, ...]


@dataclass(frozen=True, slots=True)
class CycleResult:
    """What one cycle committed (seed: "Алгоритм", step 8). Counts are calls."""

    as_of: datetime
    missed: int
    failed: int
    poisoned: int
    skipped_locked: Mapping[Phase, int]
    duration: timedelta


class ReapBatch:
    """`claim`, `transition`, `write_outbox`, in this order, each once; `write_outbox` commits.

    Nothing else ever commits: `close` rolls back what is open, so an error, Terminate or the death of the process
    between any two statements leaves nothing half-done. The cycle's time is bounded on the worker's clock
    (`max_run_duration`) and on the server (`lock_ttl`).
    """

    def __init__(
        self, engine: Engine, options: CallTimeoutReaperOptions, *, run_id: str, job_name: str, log: logging.Logger
    ) -> None:
        self._engine = engine
        self._options = options
        self._run_id = run_id
        # Seen in pg_stat_activity, and so in "who holds the lock"; the server keeps 63 bytes.
        self._application_name = f"{job_name}/{run_id}"[:63]
        self._log = log
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
        as_of = self._open_transaction.value("read_clock").astimezone(UTC)
        self._log.info("cycle started (run %s, as of %s)", self._run_id, moment(as_of))
        due = {
            "as_of": as_of,
            "ring_timeout": self._options.ring_timeout,
            "stale_answered_timeout": self._options.stale_answered_timeout,
        }
        calls: list[Call] = []
        for phase in Phase:
            found = self._open_transaction.rows(f"claim_{phase}", batch_size=self._options.batch_size, **due)
            self._log.info("batch selected (phase %s, count %d)", phase, len(found))
            calls.extend(_call(row) for row in found)
        return Claim(as_of, self._options.windows, tuple(calls), self._count_skipped(calls, due))

    def transition(self, claim: Claim) -> TransitionedBatch:
        """Decide on every claimed call and write the new states.

        A call that the guard rejects, or that a trigger of the host keeps as it is, leaves the batch and is logged.

        Raises:
            DatabaseUnavailable, DatabaseRefused, CycleTooLong: the batch is lost; `close` rolls it back.
        """
        decided, poisoned = self._decide(claim)
        written = self._write_transitions(decided)
        poisoned.extend(
            Poison(transition.before, "the database kept the row as it was; a trigger, perhaps")
            for transition in decided
            if transition.before.id not in written
        )
        for poison in poisoned:
            self._log.error("item failed (call %s): %s; it stays for the next cycle", poison.call.id, poison.reason)
        return TransitionedBatch(claim, tuple(t for t in decided if t.before.id in written), tuple(poisoned))

    def write_outbox(self, batch: TransitionedBatch) -> CycleResult:
        """Write one push intent per closed call and the record of the cycle, then commit.

        Raises:
            OutboxRowLost: a trigger swallowed a row; nothing is committed.
            OutcomeUnknown: the connection broke in COMMIT and the database does not tell.
            DatabaseUnavailable, DatabaseRefused, CycleTooLong: nothing is committed.
        """
        self._write_outbox_rows(batch.transitions)
        closed = Counter(transition.phase for transition in batch.transitions)
        result = CycleResult(
            as_of=batch.claim.as_of,
            missed=closed[Phase.RING_TIMEOUT],
            failed=closed[Phase.STALE_ANSWERED],
            poisoned=len(batch.poisoned),
            skipped_locked=batch.claim.skipped_locked,
            duration=self._open_transaction.elapsed,
        )
        has_record = self._record(result)
        self._open_transaction.commit(has_record=has_record)
        self._log.info(
            "cycle completed (committed): %d missed, %d failed, %d poisoned, %d skipped locked, %d ms",
            result.missed,
            result.failed,
            result.poisoned,
            sum(result.skipped_locked.values()),
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
        key = {"namespace": LOCK_NAMESPACE, "job": LIVE_CYCLE_LOCK}
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

    def _count_skipped(self, calls: Sequence[Call], due: Mapping[str, Any]) -> Mapping[Phase, int]:
        claimed = {phase: [call.id for call in calls if call.phase is phase] for phase in Phase}
        last = {
            f"last_{phase}": ids[-1] if len(ids) == self._options.batch_size else None for phase, ids in claimed.items()
        }
        (counts,) = self._open_transaction.rows("count_due_up_to_last_claimed", **due, **last)
        return {phase: max(0, counts[phase] - len(claimed[phase])) for phase in Phase}

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

    def _write_transitions(self, decided: Sequence[Transition]) -> set[UUID]:
        if not decided:
            return set()
        after = [transition.after for transition in decided]
        rows = self._open_transaction.rows(
            "transition_calls",
            ids=[call.id for call in after],
            statuses_before=[str(transition.before.status) for transition in decided],
            statuses=[str(call.status) for call in after],
            end_reasons=[str(call.end_reason) for call in after],
            ended_at=[call.ended_at for call in after],
            updated_at=[call.updated_at for call in after],
            durations=[call.duration_seconds for call in after],
        )
        return {row["id"] for row in rows}

    def _write_outbox_rows(self, transitions: Iterable[Transition]) -> None:
        intents = [outbox_row(transition.event) for transition in transitions]
        if not intents:
            return
        inserted = self._open_transaction.rows(
            "insert_outbox_rows",
            ids=[intent.id for intent in intents],
            kinds=[intent.kind for intent in intents],
            target_kinds=[intent.target_kind for intent in intents],
            targets=[json.dumps(intent.targets) for intent in intents],
            payloads=[json.dumps(dict(intent.payload)) for intent in intents],
        )
        missing = {intent.id: intent.payload["callId"] for intent in intents}
        for row in inserted:
            del missing[row["id"]]
        if not missing:
            return
        for row in self._open_transaction.rows("find_outbox_rows", ids=list(missing)):
            call_id = missing.pop(row["id"])
            self._log.warning("outbox row %s of call %s is there already and stays as it is", row["id"], call_id)
        if missing:
            raise OutboxRowLost(
                "messenger.realtime_outbox swallowed the rows of these calls (a trigger, perhaps), so nothing is "
                f"committed: {', '.join(missing.values())}"
            )

    def _record(self, result: CycleResult) -> bool:
        if not self._open_transaction.value("has_cycle_table"):
            self._log.warning("the schema pin_jobs is missing, so this cycle leaves no record: run `pin-jobs migrate`")
            return False
        self._open_transaction.run(
            "insert_cycle",
            run_id=self._run_id,
            as_of=result.as_of,
            missed=result.missed,
            failed=result.failed,
            skipped_locked_ring_timeout=result.skipped_locked[Phase.RING_TIMEOUT],
            skipped_locked_stale_answered=result.skipped_locked[Phase.STALE_ANSWERED],
            poisoned=result.poisoned,
        )
        return True


def moment(value: datetime) -> str:
    """A moment as people read it: UTC, milliseconds."""
    return value.astimezone(UTC).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")


def _call(row: RowMapping) -> Call:
    return Call(**{**row, "status": CallStatus(row["status"])})
