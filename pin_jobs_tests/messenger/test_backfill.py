"""The backfill: the calls of one day, under a lock of the day's own."""

from datetime import UTC, date, datetime, timedelta

import pytest
from dagster import DagsterInstance, EnvVar

from pin_jobs.messenger.batch import BACKFILL_LOCKS, LIVE_CYCLE_LOCK, LOCK_NAMESPACE, CycleResult, RunLockBusy
from pin_jobs.messenger.jobs import BACKFILL_JOB_NAME, build_call_timeout_reaper_backfill
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.messenger.transaction import CycleTooLong
from pin_jobs.resources.postgres import PostgresResource
from pin_jobs_tests.factories import a_ringing_call, an_answered_call

DAY = date(2026, 1, 15)
MIDNIGHT = datetime(2026, 1, 15, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def start_at(messenger, call, moment):
    messenger.run("UPDATE messenger.call_sessions SET started_at = :moment WHERE id = :id", moment=moment, id=call.id)


@pytest.fixture
def backfill(new_batch):
    """Runs a whole backfill of a day."""

    def run(day=DAY, **options):
        batch = new_batch(day=day, **options)
        claim = batch.claim()
        return claim if isinstance(claim, RunLockBusy) else batch.write_outbox(batch.transition(claim))

    return run


@pytest.fixture
def calls_of_the_day(messenger):
    """Two ringing calls and a silent one."""
    calls = messenger.add(
        a_ringing_call(age="1d"), a_ringing_call(age="1d"), an_answered_call(age="1d", last_sign_of_life="3h")
    )
    for hour, call in enumerate(calls):
        start_at(messenger, call, MIDNIGHT + timedelta(hours=hour))
    return calls


class TestADay:
    def test_is_closed_in_both_phases(self, messenger, backfill, calls_of_the_day):
        result = backfill()
        assert (result.missed, result.failed, result.remaining) == (2, 1, 0)
        assert [messenger.status(call) for call in calls_of_the_day] == ["Missed", "Missed", "Failed"]
        assert len(messenger.outbox()) == 3

    def test_begins_and_ends_at_midnight_utc_to_the_microsecond(self, server, messenger, backfill):
        before, first, last, after = messenger.add(*[a_ringing_call(age="1d") for _ in range(4)])
        for call, moment in (
            (before, MIDNIGHT - MICROSECOND),
            (first, MIDNIGHT),
            (last, MIDNIGHT + timedelta(days=1) - MICROSECOND),
            (after, MIDNIGHT + timedelta(days=1)),
        ):
            start_at(messenger, call, moment)
        name = messenger.value("SELECT current_database()")
        server.run(f"ALTER DATABASE {name} SET TimeZone = 'Asia/Kathmandu'")
        assert backfill().missed == 2
        assert [messenger.status(c) for c in (before, first, last, after)] == ["Ringing", "Missed", "Missed", "Ringing"]

    def test_of_today_leaves_alone_what_is_not_due(self, messenger, backfill):
        today = messenger.value("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date")
        due, fresh = messenger.add(a_ringing_call(age="1d"), a_ringing_call(age="1s"))
        start_at(messenger, due, messenger.value("SELECT date_trunc('day', clock_timestamp(), 'UTC')"))
        start_at(messenger, fresh, messenger.value("SELECT clock_timestamp()"))
        if messenger.value("SELECT clock_timestamp() < date_trunc('day', clock_timestamp(), 'UTC') + interval '1 min'"):
            pytest.skip("the day has just begun: nothing of it can be due")
        assert backfill(day=today).missed == 1
        assert (messenger.status(due), messenger.status(fresh)) == ("Missed", "Ringing")

    def test_with_nothing_due_is_a_quick_success(self, messenger, backfill):
        assert (backfill().missed, backfill().remaining) == (0, 0)
        assert [cycle["partition"] for cycle in messenger.cycles()] == ["2026-01-15"] * 2

    @pytest.mark.usefixtures("calls_of_the_day")
    def test_closed_again_changes_nothing(self, messenger, backfill):
        backfill()
        before = messenger.rows("SELECT * FROM messenger.call_sessions ORDER BY id"), messenger.outbox()
        assert backfill().missed == 0
        assert (messenger.rows("SELECT * FROM messenger.call_sessions ORDER BY id"), messenger.outbox()) == before

    @pytest.mark.usefixtures("calls_of_the_day")
    def test_with_more_than_one_run_takes_says_how_many_remain(self, backfill):
        result = backfill(backfill_batch_size=1)
        assert (result.missed, result.failed, result.remaining) == (1, 1, 1)
        assert backfill(backfill_batch_size=1).remaining == 0

    @pytest.mark.usefixtures("calls_of_the_day")
    def test_takes_more_than_an_ordinary_batch(self, backfill):
        assert backfill(batch_size=1, catch_up_batch_size=1).missed == 2

    def test_may_take_four_times_as_long_as_a_live_cycle(self, messenger, backfill, new_batch):
        (call,) = messenger.add(a_ringing_call(age="1d"))
        start_at(messenger, call, MIDNIGHT)
        messenger.run(
            "CREATE FUNCTION messenger.slow() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_sleep(1.2); RETURN NEW; END $$"
        )
        messenger.run(
            "CREATE TRIGGER slow BEFORE UPDATE ON messenger.call_sessions FOR EACH ROW "
            "EXECUTE FUNCTION messenger.slow()"
        )
        bounds = {"max_run_duration": timedelta(seconds=1), "lock_ttl": timedelta(seconds=2)}
        live = new_batch(**bounds)
        claim = live.claim()
        with pytest.raises(CycleTooLong):
            live.transition(claim)
        live.close()
        assert backfill(**bounds).missed == 1


class TestBesideTheLiveCycle:
    @pytest.mark.usefixtures("calls_of_the_day")
    def test_each_goes_on_and_no_call_is_closed_twice(self, messenger, new_batch, reap):
        (other,) = messenger.add(a_ringing_call(age="46s"))
        batch = new_batch(day=DAY)
        claim = batch.claim()
        live = reap()
        assert isinstance(live, CycleResult)
        assert (live.missed, live.failed, sum(live.skipped_locked.values())) == (1, 0, 3)
        assert messenger.status(other) == "Missed"
        assert batch.write_outbox(batch.transition(claim)).missed == 2
        assert len(messenger.outbox()) == 4

    def test_a_live_cycle_under_way_does_not_keep_it_from_running(self, new_batch, backfill):
        new_batch().claim()
        assert isinstance(backfill(), CycleResult)

    def test_neither_does_another_day(self, new_batch, backfill):
        new_batch(day=DAY + timedelta(days=1)).claim()
        assert isinstance(backfill(), CycleResult)

    def test_the_same_day_takes_turns(self, new_batch, backfill):
        new_batch(day=DAY).claim()
        assert isinstance(backfill(), RunLockBusy)

    def test_its_lock_is_that_of_no_other_job(self):
        assert BACKFILL_LOCKS + date.min.toordinal() > 10_000 > LIVE_CYCLE_LOCK
        assert BACKFILL_LOCKS + date.max.toordinal() < 2**31
        assert LOCK_NAMESPACE < 2**31


def is_failure(entry):
    return entry.dagster_event is not None and entry.dagster_event.is_job_failure


@pytest.fixture
def execute(pin_jobs_environment):
    """Runs the job in this process, for a partition or with a tag of one's own choice."""
    assert pin_jobs_environment
    database = PostgresResource(url=EnvVar("MESSENGER_DATABASE_URL"))
    with DagsterInstance.ephemeral() as instance:

        def run(key=None, by_hand=None, **options):
            job = build_call_timeout_reaper_backfill(CallTimeoutReaperOptions(**options), database)
            tags = {} if key is None else {"dagster/partition": key}
            config = {"resources": {"reap_batch": {"config": by_hand}}} if by_hand else None
            result = job.execute_in_process(instance=instance, raise_on_error=False, tags=tags, run_config=config)
            return result, instance

        yield run


class TestARun:
    @pytest.mark.usefixtures("calls_of_the_day")
    def test_closes_its_day(self, messenger, execute):
        result, _ = execute("2026-01-15")
        assert result.success
        assert messenger.statuses() == {"Missed": 2, "Failed": 1}

    @pytest.mark.usefixtures("calls_of_the_day")
    def test_that_leaves_calls_of_its_day_fails_and_says_what_it_did(self, messenger, execute):
        result, instance = execute("2026-01-15", backfill_batch_size=1)
        assert not result.success
        (failure,) = [event for event in result.all_node_events if event.is_step_failure]
        assert failure.step_key == "write_outbox"
        described = failure.event_specific_data.user_failure_data
        assert described.description == (
            "committed: 1 missed, 1 failed. Calls of 2026-01-15 still due: 1. Launch the day again (or: Re-execute all)"
        )
        assert described.metadata["committed"].value is True
        assert described.metadata["remaining"].value == 1
        assert messenger.statuses() == {"Missed": 1, "Ringing": 1, "Failed": 1}
        assert not [e for e in instance.all_logs(result.run_id) if "rolled back" in e.user_message]
        again, _ = execute("2026-01-15", backfill_batch_size=1)
        assert again.success
        assert messenger.statuses() == {"Missed": 2, "Failed": 1}

    def test_that_could_not_tell_poison_from_healthy_calls_in_time_fails_too(self, messenger, execute):
        calls = messenger.add(*[a_ringing_call(age="1d") for _ in range(12)])
        for position, call in enumerate(calls):
            start_at(messenger, call, MIDNIGHT + position * MICROSECOND)
        poison = calls[0].id
        messenger.run(
            "CREATE FUNCTION messenger.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.3); "
            f"IF NEW.id = '{poison}' THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$"
        )
        messenger.run(
            "CREATE TRIGGER slow BEFORE UPDATE ON messenger.call_sessions FOR EACH ROW "
            "EXECUTE FUNCTION messenger.slow()"
        )
        bounds = {"max_run_duration": timedelta(milliseconds=750), "lock_ttl": timedelta(seconds=2)}
        result, _ = execute("2026-01-15", **bounds)
        (failure,) = [event for event in result.all_node_events if event.is_step_failure]
        metadata = failure.event_specific_data.user_failure_data.metadata
        assert metadata["committed"].value is True
        assert metadata["remaining"].value == 11 - messenger.statuses().get("Missed", 0) > 0

    def test_that_skips_calls_held_by_others_reports_them_and_succeeds(self, messenger, execute, calls_of_the_day):
        held = calls_of_the_day[0].id
        with messenger.holding("SELECT FROM messenger.call_sessions WHERE id = :id FOR UPDATE", id=held):
            result, _ = execute("2026-01-15")
        assert result.success
        (output,) = [e for e in result.all_node_events if e.is_successful_output and e.step_key == "write_outbox"]
        shown = output.event_specific_data.metadata
        assert (shown["missed"].value, shown["skipped_locked"].value, shown["remaining"].value) == (1, 1, 0)

    @pytest.mark.usefixtures("calls_of_the_day")
    def test_may_be_dry_and_then_does_not_fail_for_what_remains(self, messenger, execute):
        result, _ = execute("2026-01-15", by_hand={"dry_run": True}, backfill_batch_size=1)
        assert result.success
        assert messenger.statuses() == {"Ringing": 2, "Answered": 1}
        assert messenger.cycles() == []

    def test_keeps_its_poison_in_the_quarantine_of_the_live_cycle(self, messenger, execute, reap):
        poison, healthy = messenger.add(a_ringing_call(age="1d", end_reason="Hangup"), a_ringing_call(age="1d"))
        for call in (poison, healthy):
            start_at(messenger, call, MIDNIGHT)
        assert execute("2026-01-15")[0].success
        assert messenger.status(healthy) == "Missed"
        assert reap().poisoned == 1  # its second attempt, for which there is no delay
        (row,) = messenger.rows("SELECT call_id, attempts FROM pin_jobs.quarantined_calls")
        assert (row["call_id"], row["attempts"]) == (poison.id, 2)
        result, _ = execute("2026-01-15")
        assert result.success
        assert messenger.value("SELECT attempts FROM pin_jobs.quarantined_calls") == 2

    @pytest.mark.parametrize(
        ("key", "words"),
        [
            (None, "no day was given"),
            ("2023-12-31", "'2023-12-31' is no day from the first one to today"),
            ("2999-01-01", "'2999-01-01' is no day"),
            ("yesterday", "'yesterday' is no day"),
            ("2026-1-15", "'2026-1-15' is no day"),
        ],
    )
    @pytest.mark.usefixtures("calls_of_the_day")
    def test_without_a_day_of_its_own_fails_in_one_line(self, messenger, execute, key, words):
        result, instance = execute(key)
        assert not result.success
        (error,) = [e.dagster_event.job_failure_data.error for e in instance.all_logs(result.run_id) if is_failure(e)]
        assert words in error.message
        assert error.cause is None
        assert messenger.statuses() == {"Ringing": 2, "Answered": 1}

    @pytest.mark.usefixtures("pin_jobs_environment")
    def test_is_of_a_job_with_a_partition_for_every_day_until_today(self):
        first = datetime.now(UTC).date() - timedelta(days=3)
        job = build_call_timeout_reaper_backfill(
            CallTimeoutReaperOptions(backfill_first_day=first), PostgresResource(url=EnvVar("MESSENGER_DATABASE_URL"))
        )
        assert job.name == BACKFILL_JOB_NAME
        keys = job.partitions_def.get_partition_keys()
        assert (keys[0], len(keys)) == (first.isoformat(), 4)
        assert keys[-1] == datetime.now(UTC).date().isoformat()
