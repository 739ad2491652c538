"""What is due is decided by the database's clock alone, to the microsecond, whatever else shows which time."""

import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from pin_jobs.messenger.batch import Claim, CycleResult, ReapBatch, RunLockBusy
from pin_jobs.messenger.calls import Call, CallStatus, CallWindows
from pin_jobs.messenger.calls import reap as rule
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.messenger.sensors import look_at_calls
from pin_jobs_tests.conftest import JOBS_ROLE
from pin_jobs_tests.deployment import REPOSITORY_ROOT, host_environment
from pin_jobs_tests.factories import Messenger, StoredCall, an_answered_call
from pin_jobs_tests.scenarios.clock import DatabaseClock

NewBatch = Callable[..., ReapBatch]
Reap = Callable[..., CycleResult | RunLockBusy]
NOON = datetime(2026, 3, 28, 12, tzinfo=UTC)
MICROSECOND, MINUTE, HOUR, DAY = timedelta(microseconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
DEFAULTS = CallTimeoutReaperOptions()


def test_a_call_silent_for_ten_days_fails_in_the_first_cycle_with_one_event(messenger: Messenger, reap: Reap) -> None:
    (call, from_the_future) = messenger.add(an_answered_call("11d", "10d"), an_answered_call("-1h", "10d"))

    for _ in range(2):
        reap()

    assert messenger.statuses() == {"Failed": 2}
    assert len(messenger.outbox(call)) == len(messenger.outbox(from_the_future)) == 1
    assert [cycle["failed"] for cycle in messenger.cycles()] == [2, 0]


@pytest.mark.parametrize("window", [DEFAULTS.ring_timeout, DEFAULTS.stale_answered_timeout], ids=["ring", "stale"])
def test_a_call_is_closed_at_the_end_of_its_window_and_not_a_microsecond_earlier(
    messenger: Messenger, clock: DatabaseClock, reap: Reap, window: timedelta
) -> None:
    is_ring = window == DEFAULTS.ring_timeout
    ages = [window - timedelta(milliseconds=1), window - MICROSECOND, window, window + timedelta(milliseconds=1)]
    clock.set(NOON)
    calls = messenger.add(*(_ringing(age) if is_ring else _answered(age) for age in ages))

    probe = look_at_calls(messenger.jobs_engine, DEFAULTS)
    reap()

    assert probe.due == 2
    closed = "Missed" if is_ring else "Failed"
    assert [messenger.status(call) for call in calls] == [calls[0].status, calls[1].status, closed, closed]
    clock.set(NOON + MICROSECOND)
    reap()
    assert [messenger.status(call) for call in calls] == [calls[0].status, closed, closed, closed]


@pytest.fixture
def messenger_without_some_updates(messenger: Messenger) -> Messenger:
    """Of a host whose `updated_at` may be NULL."""
    messenger.run("ALTER TABLE messenger.call_sessions ALTER updated_at DROP NOT NULL")
    return messenger


_offsets = st.one_of(
    st.sampled_from([timedelta(0), MICROSECOND, -MICROSECOND]),
    st.timedeltas(-timedelta(seconds=1), timedelta(seconds=1)),
    st.timedeltas(-400 * DAY, 400 * DAY),
)


@settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    # A smaller example would take minutes to find, and the calls in question are named.
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    as_of=st.datetimes(datetime(2020, 1, 1), datetime(2060, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001  # given below
    ring=st.timedeltas(MICROSECOND, 40 * DAY),
    stale_is_longer_by=st.timedeltas(MICROSECOND, 40 * DAY),
    calls=st.lists(
        st.tuples(st.sampled_from(["Ringing", "Answered", "Silent", "Ended"]), _offsets, _offsets),
        min_size=1,
        max_size=30,
    ),
)
def test_the_database_selects_exactly_the_calls_that_the_rule_calls_due(
    messenger_without_some_updates: Messenger,
    clock: DatabaseClock,
    new_batch: NewBatch,
    as_of: datetime,
    ring: timedelta,
    stale_is_longer_by: timedelta,
    calls: list[tuple[str, timedelta, timedelta]],
) -> None:
    options = {"ring_timeout": ring, "stale_answered_timeout": ring + stale_is_longer_by}
    windows = CallWindows(options["ring_timeout"], options["stale_answered_timeout"])
    messenger = messenger_without_some_updates
    messenger.run("DELETE FROM messenger.call_sessions")
    clock.set(as_of)
    messenger.add(*(_around_the_end_of_its_window(windows, *call) for call in calls))
    rows = messenger.rows("SELECT * FROM messenger.call_sessions")

    probe = look_at_calls(messenger.jobs_engine, CallTimeoutReaperOptions(**options))
    batch = new_batch(**options)
    claim = batch.claim()
    batch.close()

    assert isinstance(claim, Claim)
    assert claim.as_of == as_of
    due = {row["id"] for row in rows if rule(_call(row), as_of, windows)}
    claimed = {call.id for call in claim.calls}
    in_dispute = [(row["status"], _call(row).overdue(as_of, windows)) for row in rows if row["id"] in claimed ^ due]
    assert in_dispute == []
    assert probe.due == len(due)


@pytest.mark.parametrize(
    ("zone", "shift", "variables"),
    [
        pytest.param("UTC", 40, {}, id="UTC, 40 s ahead"),
        pytest.param("Asia/Shanghai", -40, {}, id="Shanghai, 40 s behind"),
        pytest.param(
            "America/St_Johns",
            400 * 86400,
            {"PGTZ": "Asia/Kathmandu", "PGDATESTYLE": "German", "PGOPTIONS": "-c TimeZone=Asia/Tokyo"},
            id="a year ahead, and settings of the client",
        ),
    ],
)
def test_a_worker_selects_the_same_calls_whatever_its_clock_and_time_zone(
    messenger: Messenger, clock: DatabaseClock, zone: str, shift: float, variables: dict[str, str]
) -> None:
    clock.set(NOON)
    ages = [timedelta(seconds=seconds) for seconds in (5, 44, 44.999999, 45, 46, 85, 86, 3600)]
    ringing = messenger.add(*map(_ringing, ages))
    answered = messenger.add(*(_answered(age + 2 * HOUR - timedelta(seconds=45)) for age in ages))
    # Oldest first.
    due = [*reversed(ringing[3:]), *reversed(answered[3:])]

    report = _report_of_a_worker(messenger, zone, shift, variables)

    assert report["ahead"] == pytest.approx([shift, shift], abs=20)
    assert (report["hour_of_epoch"] == 0) is (zone == "UTC")
    assert report["as_of"] == NOON.isoformat()
    assert report["claimed"] == [str(call.id) for call in due]
    assert report["changed"] == [
        [str(call.id), "Missed" if call in ringing else "Failed", NOON.isoformat()] for call in due
    ]
    assert report["due"] == len(due)
    assert datetime.fromisoformat(report["next_deadline"]) == NOON - timedelta(seconds=3600 - 45)


# Days, which PostgreSQL counts by the calendar of the session's time zone.
_OF_DAYS = {"ring_timeout": timedelta(hours=25), "stale_answered_timeout": 2 * DAY}


@pytest.mark.parametrize(
    ("zone", "of", "change", "options"),
    [
        pytest.param("Europe/Berlin", "database", datetime(2026, 3, 29, 1, tzinfo=UTC), {}, id="an hour less"),
        pytest.param("Europe/Berlin", "role", datetime(2026, 3, 29, 1, tzinfo=UTC), _OF_DAYS, id="an hour less, days"),
        pytest.param("America/New_York", "database", datetime(2026, 11, 1, 6, tzinfo=UTC), _OF_DAYS, id="an hour more"),
        pytest.param("Australia/Lord_Howe", "role", datetime(2026, 10, 3, 15, 30, tzinfo=UTC), _OF_DAYS, id="half one"),
    ],
)
def test_in_a_week_in_which_the_clocks_change_every_call_is_closed_at_its_deadline(
    messenger: Messenger,
    clock: DatabaseClock,
    reap: Reap,
    zone: str,
    of: str,
    change: datetime,
    options: dict[str, timedelta],
) -> None:
    windows = CallTimeoutReaperOptions(**options)
    _set_time_zone(messenger, zone, of)
    assert _is_misled_by(zone, change, windows.stale_answered_timeout, messenger) is bool(options)
    deadlines = sorted(
        change + offset for offset in [*(n * DAY for n in (-3, -2, -1, 1, 2, 3)), *(n * HOUR for n in range(-3, 4))]
    )
    now = change + 9 * DAY
    clock.set(now)
    calls = [
        call
        for deadline in deadlines
        for call in (
            _ringing(now - deadline + windows.ring_timeout),
            # Not at the same moment: each phase has a deadline of its own.
            _answered(now - deadline - MINUTE + windows.stale_answered_timeout),
        )
    ]
    _add_in_utc(messenger, calls)

    for n, deadline in enumerate(sorted([*deadlines, *(deadline + MINUTE for deadline in deadlines)])):
        clock.set(deadline - MICROSECOND)
        probe = look_at_calls(messenger.jobs_engine, windows)
        assert (probe.due, probe.next_deadline) == (0, deadline)
        clock.set(deadline)
        result = reap(**options)
        assert isinstance(result, CycleResult)
        assert (result.missed, result.failed) == ((1, 0) if n % 2 == 0 else (0, 1))
        assert result.as_of == deadline

    assert messenger.statuses() == {"Missed": len(deadlines), "Failed": len(deadlines)}
    assert len(messenger.outbox()) == len(calls)


def test_a_clock_that_goes_back_an_hour_closes_no_call_twice_none_early_and_loses_none(
    messenger: Messenger, clock: DatabaseClock, reap: Reap
) -> None:
    readings = [
        *(NOON + n * 10 * MINUTE for n in range(8)),
        # It goes back by an hour, and passes that hour again.
        *(NOON + 10 * MINUTE + n * 10 * MINUTE for n in range(9)),
    ]
    clock.set(NOON)
    messenger.add(*(_answered(2 * HOUR - n * 7 * MINUTE) for n in range(12)))
    closed: dict[uuid.UUID, Any] = {}
    for reading in readings:
        clock.set(reading)
        messenger.add(_ringing(timedelta(0)), _ringing(timedelta(seconds=45)), _answered(HOUR))
        before = messenger.rows("SELECT * FROM messenger.call_sessions")
        due = {row["id"] for row in before if rule(_call(row), reading, DEFAULTS.windows)}
        probe = look_at_calls(messenger.jobs_engine, DEFAULTS)

        result = reap()

        assert isinstance(result, CycleResult)
        assert probe.due == result.missed + result.failed == len(due)
        after = {row["id"]: row for row in messenger.rows("SELECT * FROM messenger.call_sessions")}
        assert {id_ for id_, row in after.items() if row["status"] in ("Missed", "Failed")} == closed.keys() | due
        assert {id_: after[id_] for id_ in closed} == closed
        closed |= {id_: after[id_] for id_ in due}

    clock.set(readings[-1] + 2 * HOUR)
    reap()
    ids = [row["id"] for row in messenger.rows("SELECT id FROM messenger.call_sessions")]
    assert set(messenger.statuses()) == {"Missed", "Failed"}
    assert sorted(row["payload"]["callId"] for row in messenger.outbox()) == sorted(map(str, ids))


def test_a_clock_that_goes_back_in_the_middle_of_a_cycle_changes_nothing_about_it(
    messenger: Messenger, clock: DatabaseClock, new_batch: NewBatch, reap: Reap
) -> None:
    clock.set(NOON)
    calls = messenger.add(_ringing(timedelta(seconds=45)), _answered(2 * HOUR))
    batch = new_batch()
    claim = batch.claim()
    assert isinstance(claim, Claim)
    clock.set(NOON - HOUR)
    batch.write_outbox(batch.transition(claim))
    closed = [messenger.call(call) for call in calls]

    reap()

    assert [(row["status"], row["ended_at"]) for row in closed] == [("Missed", NOON), ("Failed", NOON)]
    assert [messenger.call(call) for call in calls] == closed
    assert len(messenger.outbox()) == 2


def _ringing(age: timedelta) -> StoredCall:
    return StoredCall(status="Ringing", started_age=age, updated_age=age)


def _answered(silent_for: timedelta) -> StoredCall:
    return StoredCall(status="Answered", started_age=silent_for + HOUR, updated_age=silent_for)


def _around_the_end_of_its_window(windows: CallWindows, kind: str, offset: timedelta, other: timedelta) -> StoredCall:
    """A call whose window ended `offset` ago; `other` is for the moment that must not matter to it."""
    match kind:
        case "Ringing":
            return StoredCall(status="Ringing", started_age=windows.ring + offset, updated_age=other)
        case "Silent":
            # Its host leaves updated_at NULL.
            return StoredCall(status="Answered", started_age=windows.stale_answered + offset, updated_age=None)  # type: ignore[arg-type]  # see above
        case _:
            return StoredCall(status=kind, started_age=other, updated_age=windows.stale_answered + offset)


def _call(row: Any) -> Call:
    names = ("id", "caller_user_id", "callee_user_id", "media_type", "started_at", "updated_at")
    return Call(status=CallStatus(row["status"]), **{name: row[name] for name in names})


def _report_of_a_worker(messenger: Messenger, zone: str, shift: float, variables: dict[str, str]) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "pin_jobs_tests.scenarios.shifted_worker", str(shift)],
        cwd=REPOSITORY_ROOT,
        env=host_environment(TZ=zone, MESSENGER_DATABASE_URL=messenger.jobs_url, **variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _set_time_zone(messenger: Messenger, zone: str, of: str) -> None:
    database = messenger.value("SELECT current_database()")
    target = f"DATABASE {database}" if of == "database" else f"ROLE {JOBS_ROLE} IN DATABASE {database}"
    messenger.run(f"ALTER {target} SET TimeZone = '{zone}'")
    with messenger.jobs_engine.connect() as connection:
        assert connection.scalar(text("SHOW TimeZone")) == zone


def _is_misled_by(zone: str, change: datetime, window: timedelta, messenger: Messenger) -> bool:
    """Whether a session in that zone counts this window wrongly, when the change lies in it."""
    with messenger.engine.begin() as connection:
        connection.execute(text("SELECT set_config('TimeZone', :zone, true)"), {"zone": zone})
        counted = "SELECT CAST(:moment AS timestamptz) - CAST(:window AS interval)"
        begin = connection.scalar(text(counted), {"moment": change + HOUR, "window": window})
    # In UTC, since Python holds a moment of a repeated hour for unequal to any of another zone.
    return begin.astimezone(UTC) != change + HOUR - window


def _add_in_utc(messenger: Messenger, calls: Sequence[StoredCall]) -> None:
    """The factories subtract ages, some of several days, in the time zone of their session."""
    owner = messenger.value("SELECT current_user")
    database = messenger.value("SELECT current_database()")
    messenger.run(f"ALTER ROLE {owner} IN DATABASE {database} SET TimeZone = 'UTC'")
    messenger.add(*calls)
