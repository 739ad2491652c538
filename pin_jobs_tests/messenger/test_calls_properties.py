"""The rules hold for every call, window and moment, not only for those that come to mind."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pin_jobs.messenger.calls import (
    Call,
    CallMissedEvent,
    CallStatus,
    CallWindows,
    InconsistentCall,
    next_attempt,
    outbox_row,
    reap,
)

EVERY = settings(max_examples=60, deadline=None, derandomize=True, database=None)
MICROSECOND = timedelta(microseconds=1)
ACTIVE = [CallStatus.RINGING, CallStatus.ANSWERED]

zones = st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=45)), timezone(timedelta(hours=-12))])
moments = st.builds(
    lambda seconds, zone: (datetime(2026, 3, 29, 1, 30, tzinfo=UTC) + seconds).astimezone(zone),
    st.timedeltas(timedelta(days=-10_000), timedelta(days=10_000)),
    zones,
)
windows = st.builds(
    lambda ring, longer: CallWindows(ring, ring + longer),
    st.timedeltas(MICROSECOND, timedelta(days=36_500)),
    st.timedeltas(MICROSECOND, timedelta(days=36_500)),
)


def any_call(statuses: Iterable[CallStatus]) -> st.SearchStrategy[Call]:
    return st.builds(
        Call,
        id=st.uuids(),
        caller_user_id=st.uuids(),
        callee_user_id=st.uuids(),
        media_type=st.sampled_from(["Audio", "Video"]),
        status=st.sampled_from(list(statuses)),
        started_at=moments,
        updated_at=st.none() | moments,
    )


calls, active_calls = any_call(CallStatus), any_call(ACTIVE)
marks = st.fixed_dictionaries(
    {
        "ended_at": st.none() | moments,
        "end_reason": st.none() | st.sampled_from(["Hangup", "Declined", "Timeout", "Error", ""]),
        "duration_seconds": st.none() | st.integers(-1, 10_000),
    }
)


@EVERY
@given(active_calls, windows)
def test_a_call_is_due_from_the_end_of_its_window_on_and_for_ever(call: Call, windows: CallWindows) -> None:
    ends = call.started_at + windows.ring
    if call.status is CallStatus.ANSWERED:
        ends = (call.updated_at or call.started_at) + windows.stale_answered
    assert reap(call, ends - MICROSECOND, windows) is None
    assert reap(call, ends, windows)
    assert reap(call, ends + timedelta(days=36_500), windows)


@EVERY
@given(calls, moments, windows)
def test_what_is_closed_is_told_by_the_moment_and_nothing_else_changes(
    call: Call, as_of: datetime, windows: CallWindows
) -> None:
    transition = reap(call, as_of, windows)
    if transition is None:
        return
    status, reason = {"Ringing": ("Missed", "Timeout"), "Answered": ("Failed", "Error")}[call.status]
    assert transition.before == call
    assert transition.after == replace(
        call, status=status, end_reason=reason, ended_at=as_of, updated_at=as_of, duration_seconds=None
    )
    assert reap(transition.after, as_of + timedelta(days=36_500), windows) is None


@EVERY
@given(calls, marks, moments, windows)
def test_only_an_active_call_that_is_due_can_be_inconsistent(
    call: Call, marks: dict[str, object], as_of: datetime, windows: CallWindows
) -> None:
    marked = replace(call, **marks)  # type: ignore[arg-type]  # values by name
    if reap(call, as_of, windows) and any(value is not None for value in marks.values()):
        with pytest.raises(InconsistentCall):
            reap(marked, as_of, windows)
    else:
        assert (reap(marked, as_of, windows) is None) is (reap(call, as_of, windows) is None)


@EVERY
@given(active_calls, windows)
def test_a_push_says_who_is_told_and_names_the_call_its_status_and_its_kind_only(
    call: Call, windows: CallWindows
) -> None:
    transition = reap(call, datetime(2399, 1, 1, tzinfo=UTC), windows)
    assert transition
    row = outbox_row(transition.event)
    parties = (
        [call.caller_user_id]
        if isinstance(transition.event, CallMissedEvent)
        else [call.caller_user_id, call.callee_user_id]
    )
    assert row.targets == tuple(f"user:{party}" for party in parties)
    assert row.payload == {"callId": str(call.id), "status": transition.after.status, "mediaType": call.media_type}
    assert all(type(value) is str for value in row.payload.values())


@EVERY
@given(active_calls, active_calls)
def test_pushes_of_different_calls_and_kinds_never_share_an_id(one: Call, other: Call) -> None:
    rows = []
    for call in (one, other, replace(one, id=other.id), replace(one, status=other.status)):
        transition = reap(call, datetime(2399, 1, 1, tzinfo=UTC), CallWindows(MICROSECOND, 2 * MICROSECOND))
        assert transition
        rows.append((call.id, call.status, outbox_row(transition.event).id))
    assert len({row_id for _, _, row_id in rows}) == len({row[:2] for row in rows})


@EVERY
@given(st.integers(1, 10_000), moments)
def test_delays_grow_from_none_to_a_quarter_of_an_hour(attempts: int, as_of: datetime) -> None:
    assert next_attempt(1, as_of) == as_of
    assert as_of <= next_attempt(attempts, as_of) <= next_attempt(attempts + 1, as_of)
    assert next_attempt(attempts, as_of) <= as_of + timedelta(minutes=15)
    assert next_attempt(10_000, as_of) == as_of + timedelta(minutes=15)
