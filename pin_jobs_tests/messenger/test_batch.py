import logging
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from pin_jobs.database import DatabaseRefused, connect_to, parse_database_url
from pin_jobs.messenger.batch import (
    LIVE_CYCLE_LOCK,
    LOCK_NAMESPACE,
    CycleResult,
    ReapBatch,
    RunLockBusy,
)
from pin_jobs.messenger.calls import CallMissedEvent, Phase, outbox_row
from pin_jobs.messenger.transaction import QUERIES
from pin_jobs_tests.conftest import GRANTS, JOBS_ROLE
from pin_jobs_tests.factories import Messenger, a_finished_call, a_ringing_call, an_answered_call, note_transactions
from pin_jobs_tests.waiting import wait_for

TAKE_RUN_LOCK = f"SELECT pg_advisory_xact_lock({LOCK_NAMESPACE}, {LIVE_CYCLE_LOCK})"
NOTHING_SKIPPED = {Phase.RING_TIMEOUT: 0, Phase.STALE_ANSWERED: 0}


def ids(calls):
    return [call.id for call in calls]


def swallow(messenger: Messenger, table: str, event: str, condition: str = "true") -> None:
    """A trigger of the host that silently drops what it is asked to write."""
    messenger.run(
        f"CREATE FUNCTION messenger.swallow() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN IF {condition} THEN RETURN NULL; END IF; RETURN NEW; END $$"
    )
    messenger.run(
        f"CREATE TRIGGER swallow BEFORE {event} ON messenger.{table} FOR EACH ROW EXECUTE FUNCTION messenger.swallow()"
    )


def raise_on(messenger: Messenger, table: str, event: str) -> None:
    messenger.run(
        "CREATE FUNCTION messenger.refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION USING ERRCODE = 'XX001', MESSAGE = 'the host is broken'; END $$"
    )
    messenger.run(
        f"CREATE TRIGGER refuse BEFORE {event} ON messenger.{table} FOR EACH ROW EXECUTE FUNCTION messenger.refuse()"
    )


def nothing_was_written(messenger: Messenger) -> bool:
    terminal = {"Missed", "Failed"} & messenger.statuses().keys()
    return not terminal and not messenger.outbox() and not messenger.cycles()


class TestACycle:
    def test_with_nothing_due_commits_an_empty_cycle(self, messenger, reap):
        fresh = messenger.add(a_ringing_call(age="1s"), an_answered_call(), a_finished_call())
        before = [messenger.call(call) for call in fresh]
        result = reap()
        assert (result.missed, result.failed, result.poisoned, result.skipped_locked) == (0, 0, 0, NOTHING_SKIPPED)
        assert [messenger.call(call) for call in fresh] == before
        assert messenger.outbox() == []
        assert len(messenger.cycles()) == 1

    def test_makes_a_call_that_rang_too_long_missed(self, messenger, reap):
        (call,) = messenger.add(a_ringing_call(age="46s", media_type="Video"))
        before = messenger.call(call)
        result = reap()
        assert dict(messenger.call(call)) == {
            **before,
            "status": "Missed",
            "end_reason": "Timeout",
            "ended_at": result.as_of,
            "updated_at": result.as_of,
            "duration_seconds": None,
        }
        (row,) = messenger.outbox()
        assert row["id"] == outbox_row(CallMissedEvent(call.id, "Video", call.caller_user_id)).id
        assert (row["kind"], row["target_kind"]) == ("CallMissed", "User")
        assert row["targets"] == [f"user:{call.caller_user_id}"]
        assert row["payload"] == {"callId": str(call.id), "status": "Missed", "mediaType": "Video"}
        assert (row["dispatched_at"], row["attempts"], row["last_error"]) == (None, 0, None)
        assert (result.missed, result.failed) == (1, 0)

    def test_makes_an_answered_call_without_a_sign_of_life_failed(self, messenger, reap):
        (call,) = messenger.add(an_answered_call(age="5h", last_sign_of_life="121min"))
        before = messenger.call(call)
        result = reap()
        assert dict(messenger.call(call)) == {
            **before,
            "status": "Failed",
            "end_reason": "Error",
            "ended_at": result.as_of,
            "updated_at": result.as_of,
            "duration_seconds": None,
        }
        (row,) = messenger.outbox()
        assert (row["kind"], row["target_kind"]) == ("CallEnded", "User")
        assert row["targets"] == [f"user:{call.caller_user_id}", f"user:{call.callee_user_id}"]
        assert row["payload"] == {"callId": str(call.id), "status": "Failed", "mediaType": "Audio"}
        assert (result.missed, result.failed) == (0, 1)

    def test_leaves_alone_what_is_not_due_or_over(self, messenger, reap):
        untouched = messenger.add(
            a_ringing_call(age="30s"),
            an_answered_call(age="5h", last_sign_of_life="30s"),
            a_ringing_call(age="-10min"),
            *[a_finished_call(status, age="9d") for status in ("Ended", "Declined", "Missed", "Failed")],
        )
        before = [messenger.call(call) for call in untouched]
        (due,) = messenger.add(a_ringing_call(age="46s"))
        reap()
        assert [messenger.call(call) for call in untouched] == before
        assert messenger.status(due) == "Missed"
        assert len(messenger.outbox()) == 1

    def test_writes_calls_events_and_its_own_record_in_one_transaction(self, messenger, reap):
        tables = ("messenger.call_sessions", "messenger.realtime_outbox", "pin_jobs.reaper_cycles")
        messenger.add(a_ringing_call(age="46s"), an_answered_call(age="5h", last_sign_of_life="3h"))
        note_transactions(messenger, *tables)
        reap()
        writes = messenger.rows("SELECT * FROM public.writes")
        assert len(writes) == 5
        assert len({row["transaction"] for row in writes}) == 1

    def test_shows_nothing_before_its_commit(self, messenger, new_batch):
        messenger.add(a_ringing_call(age="46s"), an_answered_call(age="5h", last_sign_of_life="3h"))
        batch = new_batch()
        transitioned = batch.transition(batch.claim())
        assert nothing_was_written(messenger)
        batch.write_outbox(transitioned)
        assert messenger.statuses() == {"Missed": 1, "Failed": 1}
        assert len(messenger.outbox()) == 2

    def test_repeated_changes_nothing(self, messenger, reap):
        calls = messenger.add(a_ringing_call(age="46s"), an_answered_call(age="5h", last_sign_of_life="3h"))
        reap()
        after_the_first = [messenger.call(call) for call in calls], messenger.outbox()
        result = reap()
        assert (result.missed, result.failed) == (0, 0)
        assert ([messenger.call(call) for call in calls], messenger.outbox()) == after_the_first

    def test_leaves_its_record(self, messenger, reap):
        messenger.add(
            *[a_ringing_call(age="46s") for _ in range(3)],
            an_answered_call(age="5h", last_sign_of_life="3h"),
            a_ringing_call(age="1min", end_reason="Hangup"),
        )
        run_id = str(uuid.uuid4())
        result = reap(run_id=run_id)
        (cycle,) = messenger.cycles()
        assert {**cycle, "finished_at": None} == {
            "run_id": run_id,
            "as_of": result.as_of,
            "finished_at": None,
            "missed": 3,
            "failed": 1,
            "skipped_locked_ring_timeout": 0,
            "skipped_locked_stale_answered": 0,
            "poisoned": 1,
            "partition": None,
        }
        assert cycle["finished_at"] >= cycle["as_of"]
        assert timedelta(0) < result.duration < timedelta(seconds=30)

    def test_works_by_the_database_clock_whatever_the_worker_believes(self, messenger, reap, monkeypatch):
        class AnHourAhead(datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime.now(tz) + timedelta(hours=1)

        ahead = time.time() + 3600
        monkeypatch.setattr(time, "time", lambda: ahead)
        for module in ("batch", "calls"):
            monkeypatch.setattr(f"pin_jobs.messenger.{module}.datetime", AnHourAhead)
        (due,) = messenger.add(a_ringing_call(age="46s"))
        (fresh,) = messenger.add(a_ringing_call(age="20s"))
        before = messenger.value("SELECT clock_timestamp()")
        result = reap()
        assert before <= result.as_of <= messenger.value("SELECT clock_timestamp()")
        assert (messenger.status(due), messenger.status(fresh)) == ("Missed", "Ringing")

    def test_takes_the_windows_from_the_options(self, messenger, reap):
        messenger.add(a_ringing_call(age="11s"), an_answered_call(age="5h", last_sign_of_life="61s"))
        result = reap(ring_timeout=timedelta(seconds=10), stale_answered_timeout=timedelta(seconds=60))
        assert (result.missed, result.failed) == (1, 1)

    @pytest.mark.parametrize("started_at", ["-infinity", "0044-03-15 00:00:00+00 BC", "0001-01-01 00:00:00+00"])
    def test_closes_a_call_that_started_before_python_can_tell(self, messenger, reap, started_at):
        calls = messenger.add(a_ringing_call(age="1s"), an_answered_call())
        messenger.run("UPDATE messenger.call_sessions SET started_at = CAST(:t AS timestamptz)", t=started_at)
        messenger.run(
            "UPDATE messenger.call_sessions SET updated_at = CAST(:t AS timestamptz) WHERE status = 'Answered'",
            t=started_at,
        )
        result = reap()
        assert (result.missed, result.failed) == (1, 1)
        assert [messenger.status(call) for call in calls] == ["Missed", "Failed"]

    def test_takes_the_start_for_a_sign_of_life_where_the_host_leaves_it_null(self, messenger, reap):
        messenger.run("ALTER TABLE messenger.call_sessions ALTER updated_at DROP NOT NULL")
        stale, alive = messenger.add(an_answered_call(age="121min"), an_answered_call(age="119min"))
        messenger.run("UPDATE messenger.call_sessions SET updated_at = NULL")
        reap()
        assert (messenger.status(stale), messenger.status(alive)) == ("Failed", "Answered")


class TestTheClaim:
    def test_takes_the_oldest_first_and_at_most_batch_size_of_each_phase(self, messenger, new_batch):
        ringing = messenger.add(*[a_ringing_call(age=f"{age}s") for age in (50, 90, 70, 60, 80)])
        answered = messenger.add(
            *[an_answered_call(age=f"{age}h", last_sign_of_life="3h") for age in (5, 9, 7)],
        )
        batch = new_batch(batch_size=2, catch_up_batch_size=2)
        claim = batch.claim()
        assert ids(claim.calls) == ids([ringing[1], ringing[4], answered[1], answered[2]])
        batch.write_outbox(batch.transition(claim))
        assert messenger.statuses() == {"Missed": 2, "Ringing": 3, "Failed": 2, "Answered": 1}

    def test_orders_equal_starts_by_id(self, messenger, new_batch):
        calls = messenger.add(*[a_ringing_call(age="1min") for _ in range(6)])
        messenger.run("UPDATE messenger.call_sessions SET started_at = '2026-01-01'")
        claim = new_batch(batch_size=4, catch_up_batch_size=4).claim()
        assert ids(claim.calls) == sorted(ids(calls))[:4]

    def test_works_off_a_backlog_in_cycles(self, messenger, reap):
        messenger.add(*[a_ringing_call(age="1min") for _ in range(5)])
        assert [reap(batch_size=2, catch_up_batch_size=2).missed for _ in range(4)] == [2, 2, 1, 0]

    def test_locks_no_more_than_it_takes(self, messenger, new_batch):
        messenger.add(*[a_ringing_call(age=f"{50 + n}s") for n in range(5)])
        new_batch(batch_size=2, catch_up_batch_size=2).claim()
        free = messenger.rows("SELECT id FROM messenger.call_sessions FOR UPDATE SKIP LOCKED")
        assert len(free) == 3

    def test_tells_how_overdue_a_call_is(self, messenger, new_batch):
        (call,) = messenger.add(a_ringing_call(age="50s"))
        claim = new_batch().claim()
        started_at = messenger.call(call)["started_at"]
        assert claim.overdue(claim.calls[0]) == claim.as_of - started_at - timedelta(seconds=45)

    def test_a_short_claim_counts_all_that_others_hold(self, messenger, new_batch):
        ringing = messenger.add(*[a_ringing_call(age=f"{90 - n}s") for n in range(5)])
        answered = messenger.add(*[an_answered_call(age="5h", last_sign_of_life="3h") for _ in range(2)])
        held = [ringing[0].id, ringing[4].id, answered[0].id]
        with messenger.holding("SELECT FROM messenger.call_sessions WHERE id = ANY(:ids) FOR UPDATE", ids=held):
            claim = new_batch().claim()
        assert ids(claim.calls) == ids([*ringing[1:4], answered[1]])
        assert claim.skipped_locked == {Phase.RING_TIMEOUT: 2, Phase.STALE_ANSWERED: 1}

    def test_a_full_claim_counts_only_those_before_its_last(self, messenger, new_batch):
        ringing = messenger.add(*[a_ringing_call(age=f"{90 - n}s") for n in range(6)])
        held = [ringing[0].id, ringing[2].id, ringing[5].id]
        with messenger.holding("SELECT FROM messenger.call_sessions WHERE id = ANY(:ids) FOR UPDATE", ids=held):
            claim = new_batch(batch_size=2, catch_up_batch_size=2).claim()
        assert ids(claim.calls) == ids([ringing[1], ringing[3]])
        assert claim.skipped_locked == {Phase.RING_TIMEOUT: 2, Phase.STALE_ANSWERED: 0}

    def test_nothing_is_skipped_when_nobody_holds_anything(self, messenger, new_batch):
        messenger.add(*[a_ringing_call(age="1min") for _ in range(3)], a_ringing_call(age="1s"))
        assert new_batch().claim().skipped_locked == NOTHING_SKIPPED

    def test_counts_what_it_skipped_into_the_record(self, messenger, reap):
        (call,) = messenger.add(a_ringing_call(age="46s"))
        with messenger.holding("SELECT FROM messenger.call_sessions WHERE id = :id FOR UPDATE", id=call.id):
            result = reap()
        assert result.skipped_locked == {Phase.RING_TIMEOUT: 1, Phase.STALE_ANSWERED: 0}
        (cycle,) = messenger.cycles()
        assert (cycle["skipped_locked_ring_timeout"], cycle["skipped_locked_stale_answered"]) == (1, 0)


class TestARival:
    def test_that_holds_the_row_wins_and_we_do_not_wait(self, messenger, reap):
        (call,) = messenger.add(a_ringing_call(age="46s"))
        answer = "UPDATE messenger.call_sessions SET status = 'Answered', updated_at = now() WHERE id = :id"
        with messenger.holding(answer, id=call.id) as rival:
            assert reap().missed == 0
            rival.commit()
        assert messenger.status(call) == "Answered"
        assert reap().missed == 0
        assert messenger.outbox() == []

    def test_that_comes_after_the_claim_waits_and_finds_the_call_closed(self, messenger, new_batch):
        (call,) = messenger.add(a_ringing_call(age="46s"))
        batch = new_batch()
        claim = batch.claim()

        def answer_call():
            with messenger.engine.begin() as connection:
                answer = "UPDATE messenger.call_sessions SET status = 'Answered' WHERE id = :id AND status = 'Ringing'"
                return connection.execute(text(answer), {"id": call.id}).rowcount

        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(answer_call)
            wait_for(
                lambda: messenger.rows(
                    "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
                ),
                timeout=5,
                what="the rival to wait for the row",
            )
            batch.write_outbox(batch.transition(claim))
            assert answered.result(5) == 0
        assert messenger.status(call) == "Missed"
        assert len(messenger.outbox(call)) == 1

    def test_that_waits_gets_the_call_when_we_roll_back(self, messenger, new_batch):
        (call,) = messenger.add(a_ringing_call(age="46s"))
        batch = new_batch()
        batch.transition(batch.claim())
        batch.close()
        answer = "UPDATE messenger.call_sessions SET status = 'Answered' WHERE id = :id AND status = 'Ringing'"
        messenger.run(answer, id=call.id)
        assert messenger.status(call) == "Answered"
        assert messenger.outbox() == []

    def test_whose_change_our_claim_does_not_know_is_not_overwritten(self, messenger, new_batch):
        # Row locks keep this from happening; the guard holds without them (INV-CALL-5).
        (call,) = messenger.add(a_ringing_call(age="46s"))
        first = new_batch()
        stale = first.claim()
        first.close()
        messenger.run("UPDATE messenger.call_sessions SET status = 'Answered', updated_at = now()")
        before = messenger.call(call)
        batch = new_batch()
        fresh = batch.claim()
        result = batch.write_outbox(batch.transition(replace(fresh, calls=stale.calls)))
        assert (result.missed, result.poisoned) == (0, 1)
        assert messenger.call(call) == before
        assert messenger.outbox() == []


class TestAnOutboxRowThatIsThereAlready:
    def test_stays_and_the_call_closes_with_a_warning(self, messenger, reap, caplog):
        call, other = messenger.add(a_ringing_call(age="46s"), a_ringing_call(age="47s"))
        reap()
        (first,) = messenger.outbox(call)
        messenger.run(
            "UPDATE messenger.call_sessions SET status = 'Ringing', end_reason = NULL, ended_at = NULL WHERE id = :id",
            id=call.id,
        )
        messenger.run("UPDATE messenger.realtime_outbox SET attempts = 3 WHERE id = :id", id=first["id"])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert reap().missed == 1
        assert messenger.status(call) == "Missed"
        assert messenger.outbox(call) == [{**first, "attempts": 3}]
        assert len(messenger.outbox(other)) == 1
        (warning,) = [record.getMessage() for record in caplog.records]
        assert str(first["id"]) in warning
        assert str(call.id) in warning


class TestPoison:
    @pytest.mark.parametrize(
        "mark",
        [{"end_reason": "Hangup"}, {"duration_seconds": 5}, {"ended_age": timedelta(seconds=3)}],
        ids=lambda mark: next(iter(mark)),
    )
    def test_a_call_that_the_guard_rejects_is_left_out_and_the_rest_commits(self, messenger, reap, caplog, mark):
        healthy = messenger.add(a_ringing_call(age="46s"), an_answered_call(age="5h", last_sign_of_life="3h"))
        (poison,) = messenger.add(a_ringing_call(age="9min", **mark))
        before = messenger.call(poison)
        result = reap()
        assert (result.missed, result.failed, result.poisoned) == (1, 1, 1)
        assert [messenger.status(call) for call in healthy] == ["Missed", "Failed"]
        assert messenger.call(poison) == before
        assert messenger.outbox(poison) == []
        (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert str(poison.id) in error.getMessage()
        assert "already has" in error.getMessage()

    def test_a_call_that_a_trigger_keeps_is_left_out_and_the_rest_commits(self, messenger, reap, caplog):
        poison, healthy = messenger.add(a_ringing_call(age="9min"), a_ringing_call(age="46s"))
        swallow(messenger, "call_sessions", "UPDATE", f"NEW.id = '{poison.id}'")
        result = reap()
        assert (result.missed, result.poisoned) == (1, 1)
        assert (messenger.status(poison), messenger.status(healthy)) == ("Ringing", "Missed")
        assert messenger.outbox(poison) == []
        assert len(messenger.outbox(healthy)) == 1
        (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert str(poison.id) in error

    def test_a_batch_of_nothing_else_still_commits_its_record(self, messenger, reap):
        messenger.add(a_ringing_call(age="9min", end_reason="Error"))
        assert reap().poisoned == 1
        assert [cycle["poisoned"] for cycle in messenger.cycles()] == [1]
        assert messenger.outbox() == []


class TestTheRunLock:
    def test_keeps_a_second_cycle_out_and_says_who_holds_it_since_when(self, messenger, new_batch, reap):
        messenger.add(a_ringing_call(age="46s"))
        run_id = str(uuid.uuid4())
        first = new_batch(run_id=run_id)
        before = messenger.value("SELECT clock_timestamp()")
        claim = first.claim()
        busy = reap()
        assert isinstance(busy, RunLockBusy)
        assert busy.application_name == f"call_timeout_reaper/{run_id}"
        assert before <= busy.since <= claim.as_of
        assert f"call_timeout_reaper/{run_id} (server process {busy.pid})" in str(busy)
        assert nothing_was_written(messenger)
        assert first.write_outbox(first.transition(claim)).missed == 1

    def test_busy_leaves_nothing_open(self, messenger, new_batch):
        second = new_batch()
        with messenger.holding(TAKE_RUN_LOCK):
            assert isinstance(second.claim(), RunLockBusy)
        assert messenger.locks() == []
        sessions = "SELECT FROM pg_stat_activity WHERE application_name LIKE 'call_timeout_reaper/%'"
        wait_for(lambda: not messenger.rows(sessions), timeout=5, what="the second session to end")

    def test_is_free_after_the_commit(self, messenger, reap):
        messenger.add(a_ringing_call(age="46s"))
        assert isinstance(reap(), CycleResult)
        assert messenger.locks() == []
        assert isinstance(reap(), CycleResult)

    @pytest.mark.parametrize("steps", ["claim", "transition"])
    def test_is_free_after_a_close_in_the_middle_and_nothing_is_committed(self, messenger, new_batch, reap, steps):
        messenger.add(a_ringing_call(age="46s"))
        batch = new_batch()
        claim = batch.claim()
        if steps == "transition":
            batch.transition(claim)
        assert messenger.locks()
        batch.close()
        assert messenger.locks() == []
        assert nothing_was_written(messenger)
        assert reap().missed == 1

    @pytest.mark.parametrize(("table", "event"), [("call_sessions", "UPDATE"), ("realtime_outbox", "INSERT")])
    def test_is_free_after_an_error_and_nothing_is_committed(self, messenger, new_batch, reap, table, event):
        messenger.add(a_ringing_call(age="46s"))
        raise_on(messenger, table, event)
        batch = new_batch()
        claim = batch.claim()
        with pytest.raises(DatabaseRefused, match=r"\(XX001\): the host is broken$"):
            batch.write_outbox(batch.transition(claim))
        batch.close()
        assert messenger.locks() == []
        assert nothing_was_written(messenger)
        messenger.run(f"DROP TRIGGER refuse ON messenger.{table}")
        assert reap().missed == 1

    def test_of_another_job_or_namespace_is_no_hindrance(self, messenger, reap):
        others = f"SELECT pg_advisory_xact_lock({LOCK_NAMESPACE}, 2), pg_advisory_xact_lock(7, {LIVE_CYCLE_LOCK})"
        with messenger.holding(others):
            assert isinstance(reap(), CycleResult)

    def test_holder_older_than_lock_ttl_is_ended(self, messenger, reap, caplog):
        (call,) = messenger.add(a_ringing_call(age="46s"))
        ttl = timedelta(seconds=0.6)
        with messenger.holding(TAKE_RUN_LOCK, application_name="a-hung-worker", by_our_role=True):
            wait_for(
                lambda: messenger.rows(
                    "SELECT FROM pg_stat_activity WHERE application_name = 'a-hung-worker' "
                    "AND xact_start < clock_timestamp() - CAST(:ttl AS interval)",
                    ttl=ttl,
                ),
                timeout=5,
                what="the holder to be older than lock_ttl",
            )
            with caplog.at_level(logging.WARNING):
                result = reap(lock_ttl=ttl, max_run_duration=timedelta(seconds=0.5))
            assert not messenger.rows("SELECT FROM pg_stat_activity WHERE application_name = 'a-hung-worker'")
        assert result.missed == 1
        assert messenger.status(call) == "Missed"
        assert any("a-hung-worker" in record.getMessage() for record in caplog.records)

    def test_holder_younger_than_lock_ttl_is_left_in_peace(self, messenger, reap):
        with messenger.holding(TAKE_RUN_LOCK, application_name="a-busy-worker", by_our_role=True) as holder:
            busy = reap()
            assert busy.application_name == "a-busy-worker"
            assert holder.execute(text("SELECT 1")).scalar() == 1

    def test_holder_is_judged_again_in_the_statement_that_ends_it(self, messenger):
        # Between finding and ending, the lock may have passed on to a healthy cycle.
        with messenger.holding(TAKE_RUN_LOCK), messenger.engine.connect() as contender:
            key = {"namespace": LOCK_NAMESPACE, "job": LIVE_CYCLE_LOCK}
            for ttl, ended in ((timedelta(minutes=1), 0), (timedelta(0), 1)):
                found = contender.execute(QUERIES["end_expired_lock_holder"], {**key, "lock_ttl": ttl})
                assert len(found.all()) == ended

    def test_expired_holder_that_we_may_not_end_is_reported_busy(self, server, messenger, reap):
        # The holder is a superuser's session, ours an ordinary role's: not even its age is shown to us.
        role = grant_what_the_reaper_needs(server, messenger)
        with messenger.holding(TAKE_RUN_LOCK, application_name="a-hung-superuser"):
            busy = reap(
                engine=engine_of(server, messenger, role),
                lock_ttl=timedelta(seconds=0.6),
                max_run_duration=timedelta(seconds=0.5),
            )
        assert busy.application_name == "a-hung-superuser"
        assert busy.since is None
        assert "an unknown moment" in str(busy)

    def test_expired_holder_of_a_role_we_are_no_heir_of_is_reported_busy(self, server, messenger, reap):
        if int(messenger.value("SHOW server_version_num")) < 160000:
            pytest.skip("a membership that is not inherited came with PostgreSQL 16")
        ours, theirs = grant_what_the_reaper_needs(server, messenger), server.create_role()
        messenger.run(f"GRANT {theirs} TO {ours} WITH INHERIT FALSE")
        messenger.run(f"GRANT pg_read_all_stats TO {ours}")
        short = {"lock_ttl": timedelta(seconds=0.6), "max_run_duration": timedelta(seconds=0.5)}
        with engine_of(server, messenger, theirs).begin() as holder:
            holder.execute(text(TAKE_RUN_LOCK))
            too_old = text("SELECT clock_timestamp() - now() > interval '0.6 s'")
            wait_for(lambda: holder.scalar(too_old), timeout=5, what="the holder to be older than lock_ttl")
            assert isinstance(reap(engine=engine_of(server, messenger, ours), **short), RunLockBusy)
            assert holder.scalar(text("SELECT true"))

    def test_lets_one_of_many_at_once_through(self, messenger, new_batch):
        calls = messenger.add(*[a_ringing_call(age="1min") for _ in range(20)])
        everybody = threading.Barrier(6)
        batches = [new_batch() for _ in range(6)]

        def cycle(batch: ReapBatch):
            everybody.wait(10)
            claim = batch.claim()
            return 0 if isinstance(claim, RunLockBusy) else batch.write_outbox(batch.transition(claim)).missed

        with ThreadPoolExecutor(6) as pool:
            closed = list(pool.map(cycle, batches))
        assert sum(closed) == 20
        assert all(len(messenger.outbox(call)) == 1 for call in calls)


class TestTheHost:
    def test_without_our_schema_still_gets_its_calls_closed(self, messenger, reap, caplog):
        messenger.run("DROP SCHEMA pin_jobs CASCADE")
        (call,) = messenger.add(a_ringing_call(age="46s"))
        with caplog.at_level(logging.WARNING):
            assert reap().missed == 1
        assert messenger.status(call) == "Missed"
        assert len(messenger.outbox(call)) == 1
        assert any("pin-jobs migrate" in record.getMessage() for record in caplog.records)

    def test_gets_the_plans_that_it_is_used_to_in_its_triggers(self, messenger, reap):
        database = messenger.value("SELECT current_database()")
        messenger.run(f"ALTER DATABASE {database} SET jit = off")
        messenger.run(f"ALTER DATABASE {database} SET enable_seqscan = on")
        messenger.run("CREATE TABLE public.seen (enable_seqscan text, jit text)")
        messenger.run(
            "CREATE FUNCTION public.see() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN INSERT INTO "
            "public.seen VALUES (current_setting('enable_seqscan'), current_setting('jit')); RETURN NEW; END $$"
        )
        for table, event in (("call_sessions", "UPDATE"), ("realtime_outbox", "INSERT")):
            messenger.run(
                f"CREATE TRIGGER see BEFORE {event} ON messenger.{table} FOR EACH ROW EXECUTE FUNCTION public.see()"
            )
        messenger.add(a_ringing_call(age="46s"))
        assert reap().missed == 1
        assert messenger.rows("SELECT * FROM public.seen") == [{"enable_seqscan": "on", "jit": "off"}] * 2

    def test_one_run_commits_at_most_once(self, messenger, new_batch):
        run_id = str(uuid.uuid4())
        first, second = messenger.add(a_ringing_call(age="46s"), a_ringing_call(age="30s"))
        batch = new_batch(run_id=run_id)
        batch.write_outbox(batch.transition(batch.claim()))
        again = new_batch(run_id=run_id, ring_timeout=timedelta(seconds=10))
        transitioned = again.transition(again.claim())
        assert ids(t.before for t in transitioned.transitions) == [second.id]
        with pytest.raises(DatabaseRefused, match="23505"):
            again.write_outbox(transitioned)
        again.close()
        assert (messenger.status(first), messenger.status(second)) == ("Missed", "Ringing")
        assert len(messenger.outbox()) == 1

    @pytest.mark.parametrize(
        "privilege",
        [
            "UPDATE ON messenger.call_sessions",
            "INSERT ON messenger.realtime_outbox",
            "INSERT ON pin_jobs.reaper_cycles",
        ],
    )
    def test_that_lacks_a_grant_is_told_so_and_nothing_is_committed(self, server, messenger, reap, privilege):
        messenger.add(a_ringing_call(age="46s"))
        role = grant_what_the_reaper_needs(server, messenger)
        messenger.run(f"REVOKE {privilege} FROM {role}")
        table = privilege.rsplit(".", 1)[1]
        with pytest.raises(DatabaseRefused, match=rf"\(42501\): permission denied for table {table}$"):
            reap(engine=engine_of(server, messenger, role))
        assert nothing_was_written(messenger)

    def test_that_hides_rows_from_our_role_fails_loudly(self, server, messenger, reap):
        messenger.add(a_ringing_call(age="46s"))
        role = grant_what_the_reaper_needs(server, messenger)
        messenger.run("ALTER TABLE messenger.call_sessions ENABLE ROW LEVEL SECURITY")
        with pytest.raises(DatabaseRefused, match="row-level security"):
            reap(engine=engine_of(server, messenger, role))

    @pytest.mark.parametrize(
        "setting",
        [
            "default_transaction_isolation = 'serializable'",
            "default_transaction_isolation = 'repeatable read'",
            "default_transaction_read_only = on",
            "default_transaction_deferrable = on",
            "TimeZone = 'Asia/Kathmandu'",
            "DateStyle = 'SQL, DMY'",
            "DateStyle = 'German'",
            "IntervalStyle = 'sql_standard'",
            "IntervalStyle = 'iso_8601'",
            "search_path = 'pg_temp'",
            "search_path = 'hostile', 'pg_catalog'",
            "row_security = off",
            "standard_conforming_strings = off",
            "enable_indexscan = off",
            "plan_cache_mode = 'force_generic_plan'",
            "client_encoding = 'LATIN1'",
            "client_encoding = 'SQL_ASCII'",
            "bytea_output = 'escape'",
        ],
    )
    @pytest.mark.parametrize("where", ["role", "database"])
    def test_with_odd_defaults_gets_a_correct_cycle(self, server, messenger, reap, setting, where):
        call, stale, fresh = messenger.add(
            a_ringing_call(age="46s"), an_answered_call(age="5h", last_sign_of_life="121min"), a_ringing_call(age="40s")
        )
        messenger.run("CREATE SCHEMA hostile")
        messenger.run("CREATE TABLE hostile.reaper_cycles (run_id text)")
        role = grant_what_the_reaper_needs(server, messenger)
        messenger.run(f"GRANT ALL ON SCHEMA hostile TO {role}")
        name = messenger.value("SELECT current_database()")
        target = f"ROLE {role}" if where == "role" else f"DATABASE {name}"
        before = messenger.call(fresh)
        messenger.run(f"ALTER {target} SET {setting}")
        result = reap(engine=engine_of(server, messenger, role))
        messenger.run(f"ALTER {target} RESET ALL")
        assert (result.missed, result.failed, result.poisoned) == (1, 1, 0)
        closed = [messenger.call(call), messenger.call(stale)]
        assert [(row["status"], row["end_reason"]) for row in closed] == [("Missed", "Timeout"), ("Failed", "Error")]
        assert {row["ended_at"] for row in closed} == {result.as_of}
        assert result.as_of.utcoffset() == timedelta(0)
        assert abs(result.as_of - datetime.now(UTC)) < timedelta(minutes=1)
        assert messenger.call(fresh) == before
        assert {row["kind"] for row in messenger.outbox()} == {"CallMissed", "CallEnded"}
        assert len(messenger.cycles()) == 1


class TestTheOrder:
    def test_of_the_steps_is_checked(self, new_batch):
        batch = new_batch()
        claim = batch.claim()
        transitioned = batch.transition(claim)
        batch.write_outbox(transitioned)
        with pytest.raises(RuntimeError, match="no open transaction"):
            batch.write_outbox(transitioned)

    def test_close_is_harmless_before_the_claim_after_the_commit_and_twice(self, messenger, new_batch, caplog):
        messenger.add(a_ringing_call(age="46s"))
        new_batch().close()
        batch = new_batch()
        batch.write_outbox(batch.transition(batch.claim()))
        caplog.clear()
        batch.close()
        batch.close()
        assert caplog.records == []
        assert messenger.statuses() == {"Missed": 1}

    def test_close_says_what_it_rolled_back(self, new_batch, caplog):
        batch = new_batch()
        batch.claim()
        caplog.clear()
        batch.close()
        assert "nothing of it was committed" in caplog.text


def grant_what_the_reaper_needs(server, messenger: Messenger) -> str:
    """A role of its own, for tests that change what a role is or may."""
    role = server.create_role()
    server.run(
        GRANTS.replace(JOBS_ROLE, role).replace("%", "%%"), database=messenger.value("SELECT current_database()")
    )
    return role


def engine_of(server, messenger: Messenger, role: str):
    url = server.url(messenger.value("SELECT current_database()"), role=role)
    return connect_to(parse_database_url(url, variable="URL of the test"), application_name="test")
