"""The rules of the call timeout reaper: what is due, what becomes of it, and which push that asks for.

Pure functions over values; the moment is always passed in. Sources: the reaper's document, sections "Алгоритм" and
"Тесты", and its invariants INV-CALL-2 (a call rings for a limited time), INV-CALL-3 (a terminal status never changes),
INV-CALL-4 (facts only: no personal data, no signalling secrets), INV-CALL-5 (one active call, guarded by its status).
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

OUTBOX_NAMESPACE = uuid.UUID("6f1d3c1e-5b7c-5d0e-9a54-3d6a9f1c2b70")
"""Fixed for ever: outbox ids are derived under it, and changing it would let a push be written twice."""

RETRY_DELAYS = tuple(timedelta(seconds=seconds) for seconds in (0, 30, 60, 120, 240, 480, 900))
"""How long a call that could not be closed is left alone after its first, second, ... attempt; the last one repeats."""


class CallStatus(StrEnum):
    """Where a call stands; all but `RINGING` and `ANSWERED` are terminal."""

    RINGING = "Ringing"
    ANSWERED = "Answered"
    ENDED = "Ended"
    DECLINED = "Declined"
    MISSED = "Missed"
    FAILED = "Failed"


class EndReason(StrEnum):
    """Why a call ended."""

    HANGUP = "Hangup"
    DECLINED = "Declined"
    TIMEOUT = "Timeout"
    ERROR = "Error"


class Phase(StrEnum):
    """The two phases of a cycle, in the order in which they are worked."""

    RING_TIMEOUT = "ring_timeout"
    STALE_ANSWERED = "stale_answered"


_PHASE_OF_STATUS = {CallStatus.RINGING: Phase.RING_TIMEOUT, CallStatus.ANSWERED: Phase.STALE_ANSWERED}


@dataclass(frozen=True, slots=True)
class CallWindows:
    """How long a call may stay active: `ring` from its start, `stale_answered` from its last sign of life."""

    ring: timedelta
    stale_answered: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call session as the messenger stores it. Moments are timezone-aware; `duration_seconds` is in seconds."""

    id: uuid.UUID
    caller_user_id: uuid.UUID
    callee_user_id: uuid.UUID
    media_type: str
    status: CallStatus
    started_at: datetime
    updated_at: datetime | None
    end_reason: str | None = None
    ended_at: datetime | None = None
    duration_seconds: int | None = None

    @property
    def phase(self) -> Phase | None:
        """The phase that would close this call, `None` for a terminal one (INV-CALL-3)."""
        return _PHASE_OF_STATUS.get(self.status)

    @property
    def last_sign_of_life(self) -> datetime:
        """`updated_at`, the only sign of life there is (INV-CALL-4); where a host leaves it NULL, `started_at`."""
        return self.updated_at or self.started_at

    def overdue(self, as_of: datetime, windows: CallWindows) -> timedelta | None:
        """How long this call has been due at `as_of`, negative when it is not yet; `None` for a terminal one."""
        match self.phase:
            case Phase.RING_TIMEOUT:
                return as_of - self.started_at - windows.ring
            case Phase.STALE_ANSWERED:
                return as_of - self.last_sign_of_life - windows.stale_answered
            case None:
                return None


@dataclass(frozen=True, slots=True)
class CallMissedEvent:
    """Nobody answered in time; the caller is told."""

    call_id: uuid.UUID
    media_type: str
    caller_user_id: uuid.UUID


@dataclass(frozen=True, slots=True)
class CallEndedEvent:
    """An answered call died without a word; both parties are told."""

    call_id: uuid.UUID
    media_type: str
    caller_user_id: uuid.UUID
    callee_user_id: uuid.UUID


@dataclass(frozen=True, slots=True)
class Transition:
    """A call as it was found, as it becomes, and the domain event of the change."""

    before: Call
    after: Call
    event: CallMissedEvent | CallEndedEvent

    @property
    def phase(self) -> Phase:
        """The phase that made this transition."""
        return _PHASE_OF_STATUS[self.before.status]


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """The intent of a push, as `messenger.realtime_outbox` keeps it."""

    id: uuid.UUID
    kind: str
    target_kind: str
    targets: tuple[str, ...]
    payload: Mapping[str, str]


class InconsistentCall(Exception):
    """The guard rejects the call: it is active and yet carries the marks of one that ended."""

    def __init__(self, call: Call) -> None:
        marks = [name for name in ("ended_at", "end_reason", "duration_seconds") if getattr(call, name) is not None]
        super().__init__(f"it is {call.status} but already has {', '.join(marks)}")


def reap(call: Call, as_of: datetime, windows: CallWindows) -> Transition | None:
    """Close a call that is due at `as_of`; bounds are inclusive (seed: "Алгоритм", step 4).

    Returns `None` for a call that is not due or already terminal (INV-CALL-3).

    Raises:
        InconsistentCall: an active call that already has `ended_at`, `end_reason` or `duration_seconds`.
    """
    overdue = call.overdue(as_of, windows)
    if overdue is None or overdue < timedelta(0):
        return None
    if (call.ended_at, call.end_reason, call.duration_seconds) != (None, None, None):
        raise InconsistentCall(call)
    if call.phase is Phase.RING_TIMEOUT:
        after = _ended(call, CallStatus.MISSED, EndReason.TIMEOUT, as_of)
        return Transition(call, after, CallMissedEvent(call.id, call.media_type, call.caller_user_id))
    after = _ended(call, CallStatus.FAILED, EndReason.ERROR, as_of)
    return Transition(call, after, CallEndedEvent(call.id, call.media_type, call.caller_user_id, call.callee_user_id))


def outbox_row(event: CallMissedEvent | CallEndedEvent) -> OutboxRow:
    """The push intent of an event: who is told what, in ids and enum words only (INV-CALL-4).

    The id is derived from the call and the kind, so one transition can never leave two rows.
    """
    users: tuple[uuid.UUID, ...]
    if isinstance(event, CallMissedEvent):
        kind, status, users = "CallMissed", CallStatus.MISSED, (event.caller_user_id,)
    else:
        kind, status, users = "CallEnded", CallStatus.FAILED, (event.caller_user_id, event.callee_user_id)
    return OutboxRow(
        id=uuid.uuid5(OUTBOX_NAMESPACE, f"{event.call_id}:{kind}"),
        kind=kind,
        target_kind="User",
        targets=tuple(f"user:{user}" for user in users),
        payload={"callId": str(event.call_id), "status": status.value, "mediaType": event.media_type},
    )


def next_attempt(attempts: int, as_of: datetime) -> datetime:
    """When a call that could not be closed `attempts` times, the last one at `as_of`, is tried again.

    First by the next cycle, since the fault may be gone by then; then ever later, up to fifteen minutes.
    """
    return as_of + RETRY_DELAYS[min(attempts, len(RETRY_DELAYS)) - 1]


def _ended(call: Call, status: CallStatus, reason: EndReason, as_of: datetime) -> Call:
    return replace(call, status=status, end_reason=reason, ended_at=as_of, updated_at=as_of, duration_seconds=None)
