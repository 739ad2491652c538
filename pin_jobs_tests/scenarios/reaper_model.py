"""What must be in the database: the reaper's document read a second time, in plain Python, without a line of ours.

Locks are the caller's affair, who knows what is open; everything else of a batch follows from what is stored.
"""

import uuid
from collections.abc import Set
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from typing import Final

RING_WINDOW: Final = timedelta(seconds=45)
STALE_WINDOW: Final = timedelta(hours=2)
PHASES: Final = {"Ringing": "ring_timeout", "Answered": "stale_answered"}
RETRY_DELAYS: Final = [timedelta(seconds=seconds) for seconds in (0, 30, 60, 120, 240, 480, 900)]
OUTBOX_NAMESPACE: Final = uuid.UUID("6f1d3c1e-5b7c-5d0e-9a54-3d6a9f1c2b70")

# Faults of the host with one call, as its triggers make them: what rejects it, and how.
CALL_FAULTS: Final = frozenset({"call raises", "call violates", "call swallowed"})
OUTBOX_FAULTS: Final = frozenset(
    {"outbox raises", "outbox swallowed", "call deferred violates", "outbox deferred raises"}
)
# Faults that do not matter where the outbox row is there already: nothing is inserted then.
ONLY_NEW_ROWS: Final = frozenset({"outbox swallowed", "outbox deferred raises"})
NO_FAULT_OF_A_CALL: Final = "call breaks"
FAULTS: Final = (*sorted(CALL_FAULTS | OUTBOX_FAULTS), NO_FAULT_OF_A_CALL)


class BatchIsLost(Exception):
    """The database answers with an error that is no call's fault."""


@dataclass(frozen=True)
class Row:
    """A call as it is stored."""

    id: uuid.UUID
    caller_user_id: uuid.UUID
    callee_user_id: uuid.UUID
    media_type: str
    status: str
    end_reason: str | None
    started_at: datetime
    answered_at: datetime | None
    ended_at: datetime | None
    duration_seconds: int | None
    updated_at: datetime | None

    @property
    def phase(self) -> str | None:
        return PHASES.get(self.status)

    @property
    def deadline(self) -> datetime:
        """Of an active call."""
        if self.status == "Ringing":
            return self.started_at + RING_WINDOW
        return (self.updated_at or self.started_at) + STALE_WINDOW

    @property
    def has_marks_of_an_ended_call(self) -> bool:
        return (self.end_reason, self.ended_at, self.duration_seconds) != (None, None, None)

    def closed(self, as_of: datetime) -> "Row":
        status, reason = ("Missed", "Timeout") if self.status == "Ringing" else ("Failed", "Error")
        return replace(self, status=status, end_reason=reason, ended_at=as_of, updated_at=as_of, duration_seconds=None)

    @property
    def intent(self) -> "Intent":
        """The push that an active call leaves when it is closed."""
        caller, callee = f"user:{self.caller_user_id}", f"user:{self.callee_user_id}"
        is_ringing = self.status == "Ringing"
        kind = "CallMissed" if is_ringing else "CallEnded"
        payload = {"callId": str(self.id), "status": "Missed" if is_ringing else "Failed", "mediaType": self.media_type}
        targets = (caller,) if is_ringing else (caller, callee)
        return Intent(uuid.uuid5(OUTBOX_NAMESPACE, f"{self.id}:{kind}"), kind, "User", targets, payload)


@dataclass(frozen=True)
class Intent:
    """A row of the outbox."""

    id: uuid.UUID
    kind: str
    target_kind: str
    targets: tuple[str, ...]
    payload: dict[str, str]


@dataclass(frozen=True)
class Quarantined:
    """A row of the quarantine."""

    attempts: int
    first_seen: datetime
    next_attempt: datetime


@dataclass(frozen=True)
class Sizes:
    """Calls per phase of an ordinary batch, of one that catches up, of a backfill."""

    batch: int
    catch_up: int
    backfill: int


@dataclass
class Cycle:
    """One batch as it must go, from its claim on; per phase what was skipped, left and waits in quarantine."""

    run_id: str
    day: date | None
    as_of: datetime
    claimed: list[uuid.UUID] = field(default_factory=list)
    attempts: dict[uuid.UUID, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    remaining: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    closing: list[uuid.UUID] = field(default_factory=list)
    poison: list[uuid.UUID] = field(default_factory=list)


@dataclass
class Stored:
    """What the four tables hold."""

    calls: dict[uuid.UUID, Row] = field(default_factory=dict)
    outbox: dict[uuid.UUID, Intent] = field(default_factory=dict)
    quarantine: dict[tuple[uuid.UUID, str], Quarantined] = field(default_factory=dict)
    cycles: dict[str, tuple[object, ...]] = field(default_factory=dict)


class Model:
    """What is stored now, and what batches make of it."""

    def __init__(self, now: datetime, sizes: Sizes) -> None:
        self.now = now
        self.sizes = sizes
        self.stored = Stored()
        self.faults: dict[uuid.UUID, str] = {}

    def due(self, phase: str, day: date | None = None) -> list[Row]:
        """In the order in which they are claimed."""
        rows = (row for row in self.stored.calls.values() if row.phase == phase and row.deadline <= self.now)
        on_the_day = (row for row in rows if day is None or row.started_at.astimezone(UTC).date() == day)
        return sorted(on_the_day, key=lambda row: (row.started_at, row.id))

    def quarantined(self, row: Row) -> Quarantined | None:
        return self.stored.quarantine.get((row.id, str(row.phase)))

    def attempt_at(self, row: Row) -> datetime:
        """From when on an active call is tried; one put off for longer than any delay is of a clock since set back."""
        quarantined = self.quarantined(row)
        if quarantined is None or quarantined.next_attempt > self.now + RETRY_DELAYS[-1]:
            return row.deadline
        return max(row.deadline, quarantined.next_attempt)

    def claim(self, run_id: str, day: date | None, locked: Set[uuid.UUID]) -> Cycle:
        cycle = Cycle(run_id, day, self.now)
        for phase in PHASES.values():
            due = self.due(phase, day)
            healthy = [row for row in due if not self.quarantined(row)]
            limit = self._limit(len(healthy), day)
            taken = [row for row in healthy if row.id not in locked][:limit]
            up_to_last = healthy[: healthy.index(taken[-1]) + 1] if len(taken) == limit else healthy
            cycle.skipped[phase] = len(up_to_last) - len(taken)
            cycle.remaining[phase] = len(healthy) - len(up_to_last)
            retries = [row for row in due if self.quarantined(row) and self.attempt_at(row) <= self.now]
            retries.sort(key=lambda row: (self.stored.quarantine[row.id, str(row.phase)].next_attempt, row.id))
            cycle.waiting[phase] = len(due) - len(healthy) - len(retries)
            room = min(limit - len(taken), max(1, limit // 10))
            retried = [row for row in retries if row.id not in locked][:room]
            cycle.claimed += [row.id for row in taken + retried]
            cycle.attempts |= {row.id: self.stored.quarantine[row.id, phase].attempts for row in retried}
        return cycle

    def transition(self, cycle: Cycle) -> None:
        """Decide and write the calls.

        Raises:
            BatchIsLost: and nothing is written.
        """
        inconsistent = [i for i in cycle.claimed if self.stored.calls[i].has_marks_of_an_ended_call]
        decided = [i for i in cycle.claimed if i not in inconsistent]
        self._find_poison(cycle, decided, CALL_FAULTS)
        cycle.poison = inconsistent + cycle.poison

    def write_outbox(self, cycle: Cycle) -> None:
        """Write the intents. If one is rejected, calls and intents are written again, part by part.

        Raises:
            BatchIsLost: and nothing is written.
        """
        if any(self._is_rejected(i, OUTBOX_FAULTS) for i in cycle.closing):
            self._find_poison(cycle, cycle.closing, CALL_FAULTS | OUTBOX_FAULTS)

    def commit(self, cycle: Cycle) -> None:
        stored = self.stored
        missed = sum(stored.calls[i].status == "Ringing" for i in cycle.closing)
        for call_id in cycle.closing:
            intent = stored.calls[call_id].intent
            stored.outbox.setdefault(intent.id, intent)
            stored.calls[call_id] = stored.calls[call_id].closed(cycle.as_of)
        for call_id in cycle.poison:
            key = call_id, str(stored.calls[call_id].phase)
            attempts = cycle.attempts.get(call_id, 0) + 1
            before = stored.quarantine.get(key)
            stored.quarantine[key] = Quarantined(
                attempts,
                before.first_seen if before else cycle.as_of,
                cycle.as_of + RETRY_DELAYS[min(attempts, len(RETRY_DELAYS)) - 1],
            )
        for call_id, phase in [*stored.quarantine]:
            if stored.calls[call_id].phase != phase:
                del stored.quarantine[call_id, phase]
        stored.cycles[cycle.run_id] = (
            cycle.as_of,
            missed,
            len(cycle.closing) - missed,
            *cycle.skipped.values(),
            len(cycle.poison),
            cycle.day.isoformat() if cycle.day else None,
        )

    def _limit(self, healthy: int, day: date | None) -> int:
        if day:
            return self.sizes.backfill
        return self.sizes.catch_up if healthy > self.sizes.batch else self.sizes.batch

    def _find_poison(self, cycle: Cycle, written: list[uuid.UUID], faults: Set[str]) -> None:
        if any(self.faults.get(i) == NO_FAULT_OF_A_CALL for i in written):
            raise BatchIsLost
        rejected = [i for i in written if self._is_rejected(i, faults)]
        cycle.closing = [i for i in written if i not in rejected]
        cycle.poison += rejected

    def _is_rejected(self, call_id: uuid.UUID, faults: Set[str]) -> bool:
        fault = self.faults.get(call_id)
        is_there = self.stored.calls[call_id].intent.id in self.stored.outbox
        return fault in faults and not (is_there and fault in ONLY_NEW_ROWS)
