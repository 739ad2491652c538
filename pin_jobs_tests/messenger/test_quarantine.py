import logging
import threading
from datetime import UTC, date, datetime, timedelta
from uuid import uuid4

import pytest

from pin_jobs.database import DatabaseRefused
from pin_jobs.messenger.calls import Phase
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.messenger.quarantine import NoQuarantine, list_quarantine, release_from_quarantine
from pin_jobs.messenger.sensors import look_at_calls
from pin_jobs_tests.factories import a_ringing_call, an_answered_call
from pin_jobs_tests.scenarios.host_commands import ANSWER_CALL, END_CALL, SIGN_OF_LIFE

OPTIONS = CallTimeoutReaperOptions()


@pytest.fixture
def quarantined(messenger, reap):
    """Two calls that the guard rejected, one a phase, each found out once."""
    calls = messenger.add(
        a_ringing_call("10min", end_reason="Hangup"), an_answered_call("5h", "3h", duration_seconds=5)
    )
    assert reap().poisoned == 2
    return calls


def rows(messenger):
    return {row["call_id"]: row for row in messenger.rows("SELECT * FROM pin_jobs.quarantined_calls")}


def mend(messenger, call):
    messenger.run(
        "UPDATE messenger.call_sessions SET end_reason = NULL, duration_seconds = NULL WHERE id = :id", id=call.id
    )


class TestAQuarantinedCall:
    @pytest.mark.usefixtures("quarantined")
    def test_is_tried_by_the_next_cycle_and_then_left_alone(self, messenger, reap):
        assert reap().poisoned == 2
        assert reap().poisoned == 0
        assert {row["attempts"] for row in rows(messenger).values()} == {2}

    def test_that_was_mended_closes_at_its_next_attempt_and_leaves(self, messenger, reap, quarantined):
        for call in quarantined:
            mend(messenger, call)
        result = reap()
        assert (result.missed, result.failed, result.poisoned) == (1, 1, 0)
        assert rows(messenger) == {}
        assert len(messenger.outbox()) == 2

    @pytest.mark.parametrize("command", [ANSWER_CALL, END_CALL])
    def test_that_somebody_else_moves_on_leaves_with_the_next_cycle(self, messenger, reap, quarantined, command):
        ringing, answered = quarantined
        messenger.run(command, id=ringing.id)
        assert [item.call_id for item in list_quarantine(messenger.jobs_engine)] == [answered.id]
        reap()
        assert rows(messenger).keys() == {answered.id}

    @pytest.mark.usefixtures("quarantined")
    def test_that_is_deleted_leaves_too(self, messenger, reap):
        messenger.run("DELETE FROM messenger.call_sessions")
        reap()
        assert rows(messenger) == {}

    def test_in_its_other_phase_is_a_new_one(self, messenger, reap, quarantined):
        ringing, _ = quarantined
        reap()
        messenger.run(
            "UPDATE messenger.call_sessions SET status = 'Answered', updated_at = started_at - interval '3 h' "
            "WHERE id = :id",
            id=ringing.id,
        )
        reap()
        row = rows(messenger)[ringing.id]
        assert (row["phase"], row["attempts"]) == ("stale_answered", 1)

    @pytest.mark.usefixtures("quarantined")
    def test_whose_next_attempt_lies_further_ahead_than_any_delay_is_due(self, messenger, reap):
        # The database's clock was set back since.
        messenger.run("UPDATE pin_jobs.quarantined_calls SET next_attempt = clock_timestamp() + interval '16 min'")
        assert look_at_calls(messenger.jobs_engine, OPTIONS).due == 2
        assert reap().poisoned == 2

    @pytest.mark.usefixtures("quarantined")
    def test_in_back_off_is_not_due_for_the_sensor_which_says_when_it_will_be(self, messenger):
        messenger.run("UPDATE pin_jobs.quarantined_calls SET next_attempt = clock_timestamp() + interval '10 min'")
        probe = look_at_calls(messenger.jobs_engine, OPTIONS)
        assert probe.due == 0
        assert probe.next_deadline == min(row["next_attempt"] for row in rows(messenger).values())

    @pytest.mark.usefixtures("quarantined")
    def test_in_back_off_is_neither_skipped_nor_remaining_but_said_to_wait(self, messenger, new_batch):
        messenger.run("UPDATE pin_jobs.quarantined_calls SET next_attempt = clock_timestamp() + interval '10 min'")
        claim = new_batch().claim()
        assert claim.calls == ()
        assert set(claim.skipped_locked.values()) == set(claim.remaining.values()) == {0}
        assert claim.in_quarantine == {Phase.RING_TIMEOUT: 1, Phase.STALE_ANSWERED: 1}

    def test_that_showed_a_sign_of_life_is_not_due_and_so_waits_for_nothing(
        self, messenger, reap, new_batch, quarantined
    ):
        reap()
        messenger.run(SIGN_OF_LIFE, id=quarantined[1].id)
        claim = new_batch().claim()
        assert claim.calls == ()
        assert claim.in_quarantine == {Phase.RING_TIMEOUT: 1, Phase.STALE_ANSWERED: 0}

    def test_held_by_somebody_is_skipped_without_waiting(self, messenger, reap, quarantined):
        ringing, _ = quarantined
        with messenger.holding("SELECT FROM messenger.call_sessions WHERE id = :id FOR UPDATE", id=ringing.id):
            assert reap().poisoned == 1

    def test_is_shared_with_the_backfill(self, messenger, new_batch, reap, quarantined):
        reap()
        (ringing, _) = quarantined
        day = messenger.call(ringing)["started_at"].astimezone(UTC).date()
        batch = new_batch(day=day)
        claim = batch.claim()
        assert ringing.id not in {call.id for call in claim.calls}
        batch.close()

    def test_whose_row_another_transaction_holds_is_not_waited_for(self, messenger, reap, quarantined):
        ringing, _ = quarantined
        messenger.run(END_CALL, id=ringing.id)
        row = "SELECT FROM pin_jobs.quarantined_calls WHERE call_id = :id FOR UPDATE"
        with messenger.holding(row, id=ringing.id):
            reap(max_run_duration=timedelta(seconds=5))
        assert ringing.id in rows(messenger)
        reap()
        assert ringing.id not in rows(messenger)


class TestADryRun:
    def test_quarantines_and_closes_nothing(self, messenger, new_batch):
        messenger.add(a_ringing_call("10min", end_reason="Hangup"), a_ringing_call("1min"))
        batch = new_batch(is_dry_run=True)
        result = batch.write_outbox(batch.transition(batch.claim()))
        assert (result.missed, result.poisoned, result.is_committed) == (1, 1, False)
        assert [item.attempts for item in result.quarantine] == [1]
        assert messenger.statuses() == {"Ringing": 2}
        assert messenger.outbox() == messenger.cycles() == []
        assert rows(messenger) == {}
        assert messenger.locks() == []


class TestTheList:
    def test_of_nothing_is_empty(self, messenger):
        assert list_quarantine(messenger.jobs_engine) == []

    def test_has_the_oldest_first_and_all_there_is_to_know(self, messenger, quarantined):
        first, second = list_quarantine(messenger.jobs_engine)
        assert {first.call_id, second.call_id} == {call.id for call in quarantined}
        assert first.first_seen <= second.first_seen
        assert {first.phase, second.phase} == set(Phase)
        assert all(item.attempts == 1 and item.first_seen.utcoffset() == timedelta(0) for item in (first, second))
        assert "already has" in first.last_error

    @pytest.mark.parametrize("state", ["missing", "behind"])
    def test_without_our_schema_says_what_to_do(self, messenger, state):
        messenger.run("DROP SCHEMA pin_jobs CASCADE" if state == "missing" else "DROP TABLE pin_jobs.quarantined_calls")
        for command in (list_quarantine, lambda engine: release_from_quarantine(engine, None)):
            with pytest.raises(NoQuarantine, match="run `pin-jobs migrate`"):
                command(messenger.jobs_engine)


class TestTheRelease:
    def test_of_some_lets_the_next_cycle_take_them_like_any_other(self, messenger, reap, quarantined):
        ringing, answered = quarantined
        reap()
        mend(messenger, ringing)
        assert release_from_quarantine(messenger.jobs_engine, [ringing.id, uuid4()]) == [ringing.id]
        assert reap().missed == 1
        assert rows(messenger).keys() == {answered.id}

    def test_of_all_takes_all(self, messenger, quarantined):
        assert set(release_from_quarantine(messenger.jobs_engine, None)) == {call.id for call in quarantined}
        assert rows(messenger) == {}

    @pytest.mark.usefixtures("quarantined")
    def test_of_what_is_still_poison_begins_anew(self, messenger, reap):
        reap()
        release_from_quarantine(messenger.jobs_engine, None)
        assert reap().poisoned == 2
        assert {row["attempts"] for row in rows(messenger).values()} == {1}

    @pytest.mark.usefixtures("quarantined")
    def test_waits_for_a_cycle_that_is_at_it(self, messenger, new_batch):
        batch = new_batch()
        transitioned = batch.transition(batch.claim())
        released = []
        thread = threading.Thread(
            target=lambda: released.extend(release_from_quarantine(messenger.jobs_engine, None)), daemon=True
        )
        batch.write_outbox(transitioned)
        thread.start()
        thread.join(20)
        assert len(released) == 2


class TestWithoutTheTable:
    @pytest.mark.parametrize("schema", ["missing", "behind"])
    def test_poison_is_isolated_all_the_same_and_the_cycle_warns(self, messenger, reap, caplog, schema):
        messenger.run(
            "DROP SCHEMA pin_jobs CASCADE"
            if schema == "missing"
            else "DROP TABLE pin_jobs.quarantined_calls; ALTER TABLE pin_jobs.reaper_cycles DROP COLUMN partition"
        )
        poison, healthy = messenger.add(a_ringing_call("10min", end_reason="Hangup"), a_ringing_call("1min"))
        for expected in (1, 0):
            with caplog.at_level(logging.WARNING):
                result = reap()
            assert (result.missed, result.poisoned) == (expected, 1)
        assert (messenger.status(poison), messenger.status(healthy)) == ("Ringing", "Missed")
        assert any("run `pin-jobs migrate`" in record.getMessage() for record in caplog.records)
        assert look_at_calls(messenger.jobs_engine, OPTIONS).due == 1

    def test_a_role_that_may_not_read_it_fails_clearly(self, messenger, reap):
        messenger.run("REVOKE SELECT ON pin_jobs.quarantined_calls FROM pin_jobs_reaper")
        with pytest.raises(DatabaseRefused, match="permission denied for table quarantined_calls"):
            reap()


def test_the_moments_of_a_backfilled_day_are_as_the_partition_says(messenger, new_batch):
    (call,) = messenger.add(a_ringing_call("1d", end_reason="Hangup"))
    messenger.run(
        "UPDATE messenger.call_sessions SET started_at = :at", at=datetime(2026, 1, 15, 23, 59, 59, 999_999, UTC)
    )
    batch = new_batch(day=date(2026, 1, 15))
    assert batch.write_outbox(batch.transition(batch.claim())).poisoned == 1
    assert call.id in rows(messenger)
