import ast
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from pin_jobs.messenger import calls
from pin_jobs.messenger.calls import (
    OUTBOX_NAMESPACE,
    Call,
    CallEndedEvent,
    CallMissedEvent,
    CallStatus,
    CallWindows,
    EndReason,
    InconsistentCall,
    Phase,
    outbox_row,
    reap,
)

AS_OF = datetime(2026, 3, 29, 1, 30, 0, 123456, tzinfo=UTC)
WINDOWS = CallWindows(ring=timedelta(seconds=45), stale_answered=timedelta(hours=2))
MICROSECOND = timedelta(microseconds=1)
CALL_ID = uuid.UUID("0b7b1c6e-0000-4000-8000-000000000001")
CALLER = uuid.UUID("0b7b1c6e-0000-4000-8000-00000000000a")
CALLEE = uuid.UUID("0b7b1c6e-0000-4000-8000-00000000000b")
TERMINAL = [CallStatus.ENDED, CallStatus.DECLINED, CallStatus.MISSED, CallStatus.FAILED]
MARKS = [
    pytest.param({"ended_at": AS_OF - timedelta(hours=3)}, "ended_at", id="ended_at"),
    pytest.param({"end_reason": "Hangup"}, "end_reason", id="end_reason"),
    pytest.param({"duration_seconds": 0}, "duration_seconds", id="duration_seconds"),
]


def a_call(status: CallStatus, **values: object) -> Call:
    defaults: dict[str, object] = {
        "id": CALL_ID,
        "caller_user_id": CALLER,
        "callee_user_id": CALLEE,
        "media_type": "Video",
        "started_at": AS_OF - timedelta(days=1),
        "updated_at": AS_OF - timedelta(days=1),
    }
    return Call(status=status, **{**defaults, **values})  # type: ignore[arg-type]  # tests give values by name


def ringing(age: timedelta, **values: object) -> Call:
    return a_call(CallStatus.RINGING, started_at=AS_OF - age, updated_at=AS_OF - age, **values)


def answered(silent_for: timedelta, **values: object) -> Call:
    return a_call(CallStatus.ANSWERED, **{"updated_at": AS_OF - silent_for, **values})


class TestWhatIsDue:
    @pytest.mark.parametrize(
        ("call", "is_due"),
        [
            pytest.param(ringing(WINDOWS.ring - MICROSECOND), False, id="ringing-a-microsecond-younger"),
            pytest.param(ringing(WINDOWS.ring), True, id="ringing-exactly-the-window"),
            pytest.param(ringing(WINDOWS.ring + MICROSECOND), True, id="ringing-a-microsecond-older"),
            pytest.param(answered(WINDOWS.stale_answered - MICROSECOND), False, id="answered-a-microsecond-younger"),
            pytest.param(answered(WINDOWS.stale_answered), True, id="answered-exactly-the-window"),
            pytest.param(answered(WINDOWS.stale_answered + MICROSECOND), True, id="answered-a-microsecond-older"),
        ],
    )
    def test_the_bounds_are_inclusive(self, call, is_due):
        assert (reap(call, AS_OF, WINDOWS) is not None) is is_due

    def test_a_ringing_call_is_timed_by_its_start_whatever_was_updated_since(self):
        assert reap(replace(ringing(WINDOWS.ring), updated_at=AS_OF), AS_OF, WINDOWS)
        assert not reap(replace(ringing(timedelta(seconds=1)), updated_at=AS_OF - WINDOWS.ring), AS_OF, WINDOWS)

    def test_an_answered_call_is_timed_by_its_last_sign_of_life_however_long_ago_it_started(self):
        assert not reap(answered(timedelta(seconds=30), started_at=AS_OF - timedelta(days=9)), AS_OF, WINDOWS)
        assert reap(answered(timedelta(days=9), started_at=AS_OF - timedelta(seconds=30)), AS_OF, WINDOWS)

    @pytest.mark.parametrize(
        ("age", "is_due"),
        [
            (WINDOWS.stale_answered - MICROSECOND, False),
            (WINDOWS.stale_answered, True),
            (WINDOWS.stale_answered + MICROSECOND, True),
        ],
    )
    def test_the_start_stands_in_for_a_missing_sign_of_life(self, age, is_due):
        call = a_call(CallStatus.ANSWERED, started_at=AS_OF - age, updated_at=None)
        assert call.last_sign_of_life == call.started_at
        assert (reap(call, AS_OF, WINDOWS) is not None) is is_due

    @pytest.mark.parametrize("call", [ringing(timedelta(hours=-1)), answered(timedelta(hours=-1))])
    def test_a_call_of_the_future_is_not_due(self, call):
        assert reap(call, AS_OF, WINDOWS) is None

    def test_moments_are_compared_across_time_zones(self):
        kathmandu = timezone(timedelta(hours=5, minutes=45))
        call = ringing(WINDOWS.ring)
        assert reap(replace(call, started_at=call.started_at.astimezone(kathmandu)), AS_OF, WINDOWS)
        younger = ringing(WINDOWS.ring - MICROSECOND)
        assert not reap(replace(younger, started_at=younger.started_at.astimezone(kathmandu)), AS_OF, WINDOWS)

    def test_overdue_counts_from_the_end_of_the_window_and_is_negative_before_it(self):
        assert ringing(WINDOWS.ring + MICROSECOND).overdue(AS_OF, WINDOWS) == MICROSECOND
        assert answered(WINDOWS.stale_answered - MICROSECOND).overdue(AS_OF, WINDOWS) == -MICROSECOND


class TestTerminalCalls:
    @pytest.mark.parametrize("status", TERMINAL)
    def test_a_terminal_call_is_left_alone_however_old(self, status):
        call = a_call(status)
        assert call.phase is None
        assert call.overdue(AS_OF, WINDOWS) is None
        assert reap(call, AS_OF, WINDOWS) is None

    @pytest.mark.parametrize("status", TERMINAL)
    def test_its_marks_are_no_inconsistency(self, status):
        call = a_call(status, ended_at=AS_OF - timedelta(hours=5), end_reason="Hangup", duration_seconds=7)
        assert reap(call, AS_OF, WINDOWS) is None

    @pytest.mark.parametrize("call", [ringing(timedelta(minutes=1)), answered(timedelta(hours=3))])
    def test_reaping_twice_is_a_no_op(self, call):
        transition = reap(call, AS_OF, WINDOWS)
        assert reap(transition.after, AS_OF, WINDOWS) is None
        assert reap(transition.after, AS_OF + timedelta(days=365), WINDOWS) is None


class TestWhatBecomesOfACall:
    def test_a_call_that_rang_too_long_is_missed(self):
        call = ringing(timedelta(seconds=46))
        transition = reap(call, AS_OF, WINDOWS)
        assert transition.phase is Phase.RING_TIMEOUT
        assert transition.before is call
        assert transition.after == Call(
            id=CALL_ID,
            caller_user_id=CALLER,
            callee_user_id=CALLEE,
            media_type="Video",
            status=CallStatus.MISSED,
            started_at=call.started_at,
            updated_at=AS_OF,
            end_reason=EndReason.TIMEOUT,
            ended_at=AS_OF,
            duration_seconds=None,
        )
        assert transition.event == CallMissedEvent(CALL_ID, "Video", CALLER)

    def test_a_call_that_died_without_a_word_is_failed(self):
        call = answered(timedelta(hours=2))
        transition = reap(call, AS_OF, WINDOWS)
        assert transition.phase is Phase.STALE_ANSWERED
        assert transition.before is call
        assert transition.after == Call(
            id=CALL_ID,
            caller_user_id=CALLER,
            callee_user_id=CALLEE,
            media_type="Video",
            status=CallStatus.FAILED,
            started_at=call.started_at,
            updated_at=AS_OF,
            end_reason=EndReason.ERROR,
            ended_at=AS_OF,
            duration_seconds=None,
        )
        assert transition.event == CallEndedEvent(CALL_ID, "Video", CALLER, CALLEE)

    def test_the_words_are_those_of_the_messenger(self):
        assert [str(status) for status in CallStatus] == [
            "Ringing",
            "Answered",
            "Ended",
            "Declined",
            "Missed",
            "Failed",
        ]
        assert [str(reason) for reason in EndReason] == ["Hangup", "Declined", "Timeout", "Error"]

    def test_ringing_calls_are_worked_first(self):
        assert list(Phase) == [Phase.RING_TIMEOUT, Phase.STALE_ANSWERED]


class TestTheGuard:
    @pytest.mark.parametrize(("mark", "name"), MARKS)
    @pytest.mark.parametrize("call", [ringing(timedelta(minutes=1)), answered(timedelta(hours=3))])
    def test_an_active_call_with_a_mark_of_an_ended_one_is_rejected(self, call, mark, name):
        with pytest.raises(InconsistentCall, match=rf"^it is {call.status} but already has {name}$"):
            reap(replace(call, **mark), AS_OF, WINDOWS)

    def test_all_marks_are_named(self):
        call = ringing(timedelta(minutes=1), ended_at=AS_OF, end_reason="Error", duration_seconds=3)
        with pytest.raises(InconsistentCall, match="ended_at, end_reason, duration_seconds"):
            reap(call, AS_OF, WINDOWS)

    @pytest.mark.parametrize(("mark", "name"), MARKS)
    def test_a_call_that_is_not_due_is_not_judged(self, mark, name):
        assert reap(replace(ringing(timedelta(seconds=1)), **mark), AS_OF, WINDOWS) is None, name


class TestTheOutbox:
    def test_a_missed_call_is_told_to_the_caller(self):
        row = outbox_row(CallMissedEvent(CALL_ID, "Audio", CALLER))
        assert (row.kind, row.target_kind, row.targets) == ("CallMissed", "User", (f"user:{CALLER}",))
        assert row.payload == {"callId": str(CALL_ID), "status": "Missed", "mediaType": "Audio"}

    def test_a_failed_call_is_told_to_both_in_one_row(self):
        row = outbox_row(CallEndedEvent(CALL_ID, "Video", CALLER, CALLEE))
        assert (row.kind, row.target_kind, row.targets) == ("CallEnded", "User", (f"user:{CALLER}", f"user:{CALLEE}"))
        assert row.payload == {"callId": str(CALL_ID), "status": "Failed", "mediaType": "Video"}

    def test_the_id_is_the_same_for_ever(self):
        # Literal values: a change of namespace or of the derived name would let a push be written twice.
        assert uuid.UUID("6f1d3c1e-5b7c-5d0e-9a54-3d6a9f1c2b70") == OUTBOX_NAMESPACE
        assert outbox_row(CallMissedEvent(CALL_ID, "Audio", CALLER)).id == uuid.UUID(
            "361bd6f2-2002-5566-aa55-93f7036547e8"
        )
        assert outbox_row(CallEndedEvent(CALL_ID, "Audio", CALLER, CALLEE)).id == uuid.UUID(
            "e04df83a-aa57-5a4e-b7e1-aecc98defec2"
        )

    def test_the_id_depends_on_the_call_and_the_kind_alone(self):
        row = outbox_row(CallMissedEvent(CALL_ID, "Audio", CALLER))
        assert row.id == outbox_row(CallMissedEvent(CALL_ID, "Video", CALLEE)).id
        assert row.id != outbox_row(CallEndedEvent(CALL_ID, "Audio", CALLER, CALLEE)).id
        assert row.id != outbox_row(CallMissedEvent(uuid.uuid4(), "Audio", CALLER)).id
        assert row.id.version == 5


def test_the_rules_import_the_standard_library_only():
    imported = set()
    for node in ast.walk(ast.parse(Path(calls.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported == {"uuid", "collections.abc", "dataclasses", "datetime", "enum"}
