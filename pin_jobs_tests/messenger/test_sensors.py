import time
from datetime import UTC, datetime, timedelta

import pytest
from dagster import (
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    DagsterRunStatus,
    DefaultSensorStatus,
    EnvVar,
    EventLogEntry,
    RunRequest,
    SkipReason,
    build_sensor_context,
)
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.storage.runs.schema import RunsTable
from sqlalchemy import text

from pin_jobs.database import DatabaseRefused, DatabaseUnavailable, connect_to, parse_database_url
from pin_jobs.messenger.calls import RETRY_DELAYS
from pin_jobs.messenger.jobs import JOB_NAME, build_call_timeout_reaper
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.messenger.sensors import (
    DUE_TAG,
    Probe,
    Unfinished,
    build_call_timeout_reaper_sensor,
    decide,
    find_unfinished,
    interval_seconds,
    look_at_calls,
)
from pin_jobs.resources.postgres import PostgresResource
from pin_jobs_tests.factories import a_finished_call, a_ringing_call, an_answered_call
from pin_jobs_tests.proxy import Breakpoint, Side

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
LOCK_TTL = timedelta(seconds=60)
OPTIONS = CallTimeoutReaperOptions()
DUE = Probe(now=NOW, due=2, next_deadline=NOW - timedelta(seconds=3.21))
MICROSECOND = timedelta(microseconds=1)


def queued(age: timedelta = timedelta(seconds=10), run_id: str = "queued-run") -> Unfinished:
    return Unfinished(run_id, is_queued=True, since=NOW - age)


def at_work(age: timedelta, run_id: str = "working-run") -> Unfinished:
    return Unfinished(run_id, is_queued=False, since=NOW - age)


class TestTheDecision:
    def test_with_no_active_call_is_to_skip(self):
        decision = decide(Probe(NOW, due=0, next_deadline=None), [], LOCK_TTL, NOW)
        assert decision == SkipReason("No call is active.")

    def test_with_nothing_due_is_to_skip_and_name_the_next_deadline(self):
        probe = Probe(NOW, due=0, next_deadline=NOW + timedelta(seconds=12, milliseconds=345))
        assert decide(probe, [], LOCK_TTL, NOW) == SkipReason(
            "No call is due; the next deadline is 2026-01-01 12:00:12.345Z."
        )

    def test_with_something_due_is_to_run_ahead_of_others(self):
        decision = decide(DUE, [], LOCK_TTL, NOW)
        assert isinstance(decision, RunRequest)
        assert decision.tags == {DUE_TAG: "2 calls, 3.2 s late"}
        # A run key would be blocked for ever by a run that failed.
        assert decision.run_key is None

    def test_speaks_of_a_single_call_in_the_singular(self):
        decision = decide(Probe(NOW, due=1, next_deadline=NOW), [], LOCK_TTL, NOW)
        assert decision.tags[DUE_TAG] == "1 call, 0.0 s late"

    @pytest.mark.parametrize("age", [timedelta(0), timedelta(seconds=10), timedelta(days=3)])
    def test_with_a_run_in_the_queue_is_to_skip_however_long_it_waits(self, age):
        decision = decide(DUE, [queued(age)], LOCK_TTL, NOW)
        assert isinstance(decision, SkipReason)
        assert "queued-run waits in the queue" in decision.skip_message

    @pytest.mark.parametrize(
        ("age", "skips"),
        [
            pytest.param(timedelta(seconds=1), True, id="just-started"),
            pytest.param(LOCK_TTL, True, id="exactly-lock-ttl"),
            pytest.param(LOCK_TTL + MICROSECOND, False, id="longer-than-lock-ttl"),
            pytest.param(timedelta(days=2), False, id="left-behind-days-ago"),
            pytest.param(-timedelta(seconds=40), True, id="clock-a-little-ahead"),
            pytest.param(-LOCK_TTL, True, id="ahead-by-exactly-lock-ttl"),
            pytest.param(-LOCK_TTL - MICROSECOND, False, id="clock-far-ahead"),
        ],
    )
    def test_with_a_run_at_work_depends_on_whether_it_can_still_hold_the_lock(self, age, skips):
        decision = decide(DUE, [at_work(age)], LOCK_TTL, NOW)
        if skips:
            assert isinstance(decision, SkipReason)
            assert "2 calls are due; run working-run is at work since" in decision.skip_message
        else:
            assert isinstance(decision, RunRequest)
            assert "not waiting for working-run" in decision.tags[DUE_TAG]

    def test_looks_at_every_unfinished_run(self):
        dead = at_work(timedelta(hours=1), "dead-run")
        assert isinstance(decide(DUE, [dead, at_work(timedelta(seconds=1))], LOCK_TTL, NOW), SkipReason)
        assert isinstance(decide(DUE, [dead, queued()], LOCK_TTL, NOW), SkipReason)
        decision = decide(DUE, [dead, at_work(timedelta(hours=2), "other-dead-run")], LOCK_TTL, NOW)
        assert "dead-run, other-dead-run" in decision.tags[DUE_TAG]

    def test_with_a_call_from_before_time_is_to_run(self):
        probe = Probe(NOW, due=1, next_deadline=datetime.min.replace(tzinfo=UTC))
        assert isinstance(decide(probe, [], LOCK_TTL, NOW), RunRequest)


@pytest.mark.parametrize(
    ("polling_interval", "interval"),
    [(5, 4), (14, 4), (15, 4), (29, 4), (30, 9), (44, 9), (45, 14), (60, 19), (3600, 1199), (86400, 28799)],
)
def test_ticks_every_third_of_the_polling_interval_one_second_short_of_the_daemons_grid(polling_interval, interval):
    assert interval_seconds(timedelta(seconds=polling_interval)) == interval


class TestTheLook:
    def test_at_an_empty_table_finds_nothing(self, messenger):
        before = messenger.value("SELECT clock_timestamp()")
        probe = look_at_calls(messenger.jobs_engine, OPTIONS)
        assert (probe.due, probe.next_deadline) == (0, None)
        assert before <= probe.now <= messenger.value("SELECT clock_timestamp()")

    def test_ignores_calls_that_are_over(self, messenger):
        messenger.add(*[a_finished_call(status, age="9d") for status in ("Ended", "Declined", "Missed", "Failed")])
        probe = look_at_calls(messenger.jobs_engine, OPTIONS)
        assert (probe.due, probe.next_deadline) == (0, None)

    def test_finds_the_next_deadline_of_either_phase(self, messenger):
        ringing, answered = messenger.add(a_ringing_call(age="10s"), an_answered_call(age="5h"))
        probe = look_at_calls(messenger.jobs_engine, OPTIONS)
        assert probe.due == 0
        assert probe.next_deadline == messenger.call(ringing)["started_at"] + OPTIONS.ring_timeout
        messenger.run("DELETE FROM messenger.call_sessions WHERE id = :id", id=ringing.id)
        probe = look_at_calls(messenger.jobs_engine, OPTIONS)
        assert probe.next_deadline == messenger.call(answered)["updated_at"] + OPTIONS.stale_answered_timeout

    def test_counts_what_is_due_in_both_phases(self, messenger):
        oldest, *_ = messenger.add(
            an_answered_call(age="9h", last_sign_of_life="8h"),
            a_ringing_call(age="46s"),
            a_ringing_call(age="47s"),
            a_ringing_call(age="30s"),
            an_answered_call(age="9h", last_sign_of_life="1h"),
        )
        probe = look_at_calls(messenger.jobs_engine, OPTIONS)
        assert probe.due == 3
        assert probe.next_deadline == messenger.call(oldest)["updated_at"] + OPTIONS.stale_answered_timeout

    def test_takes_the_start_for_a_sign_of_life_where_there_is_none(self, messenger):
        messenger.run("ALTER TABLE messenger.call_sessions ALTER updated_at DROP NOT NULL")
        messenger.add(an_answered_call(age="121min"), an_answered_call(age="119min"))
        messenger.run("UPDATE messenger.call_sessions SET updated_at = NULL")
        assert look_at_calls(messenger.jobs_engine, OPTIONS).due == 1

    def test_agrees_with_what_a_cycle_then_closes(self, messenger, reap):
        messenger.add(
            a_ringing_call(age="46s"),
            a_ringing_call(age="44s"),
            an_answered_call(age="5h", last_sign_of_life="121min"),
            an_answered_call(age="5h", last_sign_of_life="119min"),
        )
        probe = look_at_calls(messenger.jobs_engine, OPTIONS)
        result = reap()
        assert probe.due == result.missed + result.failed == 2
        assert look_at_calls(messenger.jobs_engine, OPTIONS).due == 0

    def test_waits_for_nobody(self, messenger):
        messenger.add(a_ringing_call(age="46s"))
        with messenger.holding("SELECT FROM messenger.call_sessions FOR UPDATE"):
            started = time.monotonic()
            assert look_at_calls(messenger.jobs_engine, OPTIONS).due == 1
            assert time.monotonic() - started < 2

    @pytest.mark.parametrize(("started_at", "due"), [("-infinity", 1), ("0044-03-15 BC", 1), ("infinity", 0)])
    def test_survives_moments_that_python_cannot_tell(self, messenger, started_at, due):
        messenger.add(a_ringing_call(age="1s"))
        messenger.run("UPDATE messenger.call_sessions SET started_at = CAST(:t AS timestamptz)", t=started_at)
        probe = look_at_calls(messenger.jobs_engine, OPTIONS)
        assert probe.due == due
        assert decide(probe, [], LOCK_TTL, NOW)

    def test_is_cut_off_in_time(self, messenger, monkeypatch):
        monkeypatch.setattr("pin_jobs.messenger.sensors._PROBE_TIMEOUT_MS", "300")
        with messenger.holding("LOCK TABLE messenger.call_sessions IN ACCESS EXCLUSIVE MODE"):
            started = time.monotonic()
            with pytest.raises(DatabaseRefused, match=r"\(57014\)"):
                look_at_calls(messenger.jobs_engine, OPTIONS)
            assert time.monotonic() - started < 2

    def test_uses_the_partial_index(self, messenger):
        messenger.run(
            "INSERT INTO messenger.call_sessions SELECT gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), "
            "'Audio', CASE WHEN n % 500 = 0 THEN 'Ringing' ELSE 'Ended' END, NULL, now(), NULL, NULL, NULL, now() "
            "FROM generate_series(1, 5000) AS n"
        )
        messenger.run("ANALYZE messenger.call_sessions")
        from pin_jobs.messenger.transaction import QUERIES  # noqa: PLC0415  # only here

        with messenger.engine.connect() as connection:
            plan = connection.execute(
                text("EXPLAIN " + QUERIES["probe"].text),
                {
                    "ring_timeout": OPTIONS.ring_timeout,
                    "stale_answered_timeout": OPTIONS.stale_answered_timeout,
                    "longest_delay": RETRY_DELAYS[-1],
                },
            ).scalars()
            plan = "\n".join(plan)
        assert "ix_call_active" in plan
        assert "Seq Scan on call_sessions" not in plan

    def test_on_a_database_without_the_table_is_refused_in_one_line(self, empty_database):
        engine = connect_to(parse_database_url(empty_database, variable="X"), application_name="test")
        with pytest.raises(DatabaseRefused) as error:
            look_at_calls(engine, OPTIONS)
        assert str(error.value) == (
            'the messenger database refused (42P01): relation "messenger.call_sessions" does not exist'
        )

    def test_sees_through_odd_defaults_of_the_role(self, server, messenger):
        messenger.add(a_ringing_call(age="46s"), a_ringing_call(age="40s"))
        role = server.create_role()
        messenger.run(f"GRANT USAGE ON SCHEMA messenger, pin_jobs TO {role}")
        messenger.run(f"GRANT SELECT ON messenger.call_sessions, pin_jobs.quarantined_calls TO {role}")
        for setting in (
            "default_transaction_read_only = on",
            "TimeZone = 'Asia/Kathmandu'",
            "DateStyle = 'German'",
            "IntervalStyle = 'sql_standard'",
            "client_encoding = 'SQL_ASCII'",
        ):
            messenger.run(f"ALTER ROLE {role} SET {setting}")
        url = server.url(messenger.value("SELECT current_database()"), role=role)
        engine = connect_to(parse_database_url(url, variable="X"), application_name="test")
        probe = look_at_calls(engine, OPTIONS)
        assert probe.due == 1
        assert abs(probe.now - datetime.now(UTC)) < timedelta(minutes=1)

    def test_at_rows_hidden_from_our_role_fails_loudly(self, server, messenger):
        messenger.add(a_ringing_call(age="46s"))
        role = server.create_role()
        messenger.run(f"GRANT USAGE ON SCHEMA messenger, pin_jobs TO {role}")
        messenger.run(f"GRANT SELECT ON messenger.call_sessions, pin_jobs.quarantined_calls TO {role}")
        messenger.run("ALTER TABLE messenger.call_sessions ENABLE ROW LEVEL SECURITY")
        url = server.url(messenger.value("SELECT current_database()"), role=role)
        engine = connect_to(parse_database_url(url, variable="X"), application_name="test")
        with pytest.raises(DatabaseRefused, match="row-level security"):
            look_at_calls(engine, OPTIONS)


@pytest.fixture(scope="module")
def any_instance(tmp_path_factory):
    with DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as instance:
        yield instance


@pytest.fixture
def instance(any_instance):
    """A Dagster instance without runs."""
    yield any_instance
    for run in any_instance.get_runs():
        any_instance.delete_run(run.run_id)


@pytest.fixture
def database(pin_jobs_environment):
    assert pin_jobs_environment
    return PostgresResource(url=EnvVar("MESSENGER_DATABASE_URL"), variable="MESSENGER_DATABASE_URL")


@pytest.fixture
def job(database):
    return build_call_timeout_reaper(OPTIONS, database)


@pytest.fixture
def tick(job, database, instance):
    """One tick of the sensor, as Dagster makes it."""
    sensor = build_call_timeout_reaper_sensor(job, OPTIONS, running=True)

    def evaluate():
        with build_sensor_context(instance=instance, resources={"messenger_database": database}) as context:
            return sensor(context)

    return evaluate


def a_run(instance, job, status: DagsterRunStatus, *, started: timedelta | None = None, location: str = "pin_jobs"):
    """A run of the job; `started`: how long ago its process reported that it had started."""
    repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin(location), "__repository__")
    origin = RemoteJobOrigin(repository, job.name)
    created_as = DagsterRunStatus.STARTING if started is not None else status
    run = instance.create_run_for_job(job, status=created_as, remote_job_origin=origin)
    if started is not None:
        event = DagsterEvent(DagsterEventType.RUN_START.value, job.name, message="started")
        entry = EventLogEntry(
            None, 10, "", run.run_id, (datetime.now(UTC) - started).timestamp(), job_name=job.name, dagster_event=event
        )
        instance.handle_new_event(entry)
    return run


class TestATick:
    def test_waits_for_a_run_that_has_only_just_left_a_long_queue(self, messenger, tick, instance, job):
        messenger.add(a_ringing_call(age="46s"))
        run = a_run(instance, job, DagsterRunStatus.STARTING)
        an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
        with instance.run_storage.connect() as connection:
            created = RunsTable.update().where(RunsTable.c.run_id == run.run_id)
            connection.execute(created.values(create_timestamp=an_hour_ago.replace(tzinfo=None)))
        assert "is at work" in tick().skip_message

    def test_with_nothing_due_skips(self, messenger, tick):
        assert tick() == SkipReason("No call is active.")
        messenger.add(a_ringing_call(age="10s"))
        assert tick().skip_message.startswith("No call is due; the next deadline is ")

    def test_with_a_call_due_requests_a_run(self, messenger, tick):
        messenger.add(a_ringing_call(age="46s"))
        request = tick()
        assert isinstance(request, RunRequest)
        assert request.tags[DUE_TAG].startswith("1 call, ")

    def test_asks_dagster_nothing_when_nothing_is_due(self, messenger, tick, instance, job):
        a_run(instance, job, DagsterRunStatus.QUEUED)
        assert tick() == SkipReason("No call is active.")
        assert messenger.statuses() == {}

    @pytest.mark.parametrize(
        "status",
        [
            DagsterRunStatus.QUEUED,
            DagsterRunStatus.NOT_STARTED,
            DagsterRunStatus.STARTING,
            DagsterRunStatus.CANCELING,
        ],
    )
    def test_waits_for_a_run_that_is_unfinished(self, messenger, tick, instance, job, status):
        messenger.add(a_ringing_call(age="46s"))
        run = a_run(instance, job, status)
        reason = tick()
        assert isinstance(reason, SkipReason)
        words = "waits in the queue" if status is DagsterRunStatus.QUEUED else "is at work"
        assert f"run {run.run_id} {words} since" in reason.skip_message

    @pytest.mark.parametrize("status", [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED])
    def test_does_not_wait_for_a_run_that_is_finished(self, messenger, tick, instance, job, status):
        messenger.add(a_ringing_call(age="46s"))
        a_run(instance, job, status)
        assert isinstance(tick(), RunRequest)

    def test_waits_for_a_run_that_started_within_lock_ttl_and_no_longer(self, messenger, tick, instance, job):
        messenger.add(a_ringing_call(age="46s"))
        dead = a_run(instance, job, DagsterRunStatus.STARTED, started=timedelta(seconds=70))
        request = tick()
        assert isinstance(request, RunRequest)
        assert f"not waiting for {dead.run_id}" in request.tags[DUE_TAG]
        alive = a_run(instance, job, DagsterRunStatus.STARTED, started=timedelta(seconds=50))
        assert f"run {alive.run_id} is at work" in tick().skip_message

    def test_names_the_database_that_it_cannot_reach_in_one_line(self, tick, monkeypatch):
        monkeypatch.setenv("MESSENGER_DATABASE_URL", "postgresql://u:s3cr3t@127.0.0.1:1/messenger")
        with pytest.raises(DatabaseUnavailable) as error:
            tick()
        message = str(error.value)
        assert message.startswith("the messenger database cannot be reached: ")
        assert "\n" not in message
        assert "s3cr3t" not in message

    @pytest.mark.parametrize("side", Side, ids=lambda side: f"{side.value} the server looks")
    def test_gives_a_server_up_that_falls_silent(self, messenger, tick, monkeypatch, side):
        monkeypatch.setattr("pin_jobs.messenger.sensors._ANSWER_TIMEOUT", timedelta(seconds=0.5))
        with Breakpoint(messenger.jobs_url, "SELECT clock_timestamp() AS now", side) as network:
            monkeypatch.setenv("MESSENGER_DATABASE_URL", network.url)
            started = time.monotonic()
            with pytest.raises(DatabaseUnavailable, match=r"no answer for 0\.5 s$"):
                tick()
            assert network.reached.is_set()
        assert time.monotonic() - started < 5


class TestTheUnfinishedRuns:
    def test_of_another_code_location_are_not_ours(self, instance, job):
        ours = a_run(instance, job, DagsterRunStatus.STARTED, location="pin_jobs")
        a_run(instance, job, DagsterRunStatus.STARTED, location="somebody_else")
        assert [run.run_id for run in find_unfinished(instance, JOB_NAME, "pin_jobs")] == [ours.run_id]
        assert len(find_unfinished(instance, JOB_NAME, None)) == 2

    def test_of_another_job_are_not_ours(self, instance, job):
        a_run(instance, job, DagsterRunStatus.STARTED)
        assert find_unfinished(instance, "another_job", None) == []

    def test_are_timed_by_their_start_or_else_by_their_creation(self, instance, job):
        created = a_run(instance, job, DagsterRunStatus.QUEUED)
        started = a_run(instance, job, DagsterRunStatus.STARTED, started=timedelta(hours=1))
        found = {run.run_id: run for run in find_unfinished(instance, JOB_NAME, None)}
        now = datetime.now(UTC)
        assert found[created.run_id].is_queued
        assert timedelta(0) <= now - found[created.run_id].since < timedelta(seconds=30)
        assert not found[started.run_id].is_queued
        assert abs(now - found[started.run_id].since - timedelta(hours=1)) < timedelta(seconds=30)


class TestTheDefinition:
    @pytest.mark.parametrize(
        ("running", "status"), [(True, DefaultSensorStatus.RUNNING), (False, DefaultSensorStatus.STOPPED)]
    )
    def test_starts_as_it_is_told(self, job, running, status):
        sensor = build_call_timeout_reaper_sensor(job, OPTIONS, running=running)
        assert sensor.name == "call_timeout_reaper_sensor"
        assert sensor.job_name == JOB_NAME
        assert sensor.default_status is status

    def test_follows_the_polling_interval(self, job):
        options = CallTimeoutReaperOptions(polling_interval=timedelta(minutes=1))
        assert build_call_timeout_reaper_sensor(job, options, running=True).minimum_interval_seconds == 19
