"""The table of tests of the reaper's document, row by row; its last row is in test_daemon."""

import logging
import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any

from pin_jobs.messenger.batch import Claim, CycleResult, ReapBatch, RunLockBusy
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs_tests.factories import (
    Messenger,
    StoredCall,
    a_finished_call,
    a_ringing_call,
    an_answered_call,
    note_transactions,
)
from pin_jobs_tests.scenarios.host_commands import ANSWER_CALL, END_CALL, command
from pin_jobs_tests.waiting import wait_for

NewBatch = Callable[..., ReapBatch]
Reap = Callable[..., CycleResult | RunLockBusy]


def test_an_empty_batch_succeeds_and_changes_nothing(messenger: Messenger, reap: Reap) -> None:
    calls = messenger.add(a_ringing_call("10s"), an_answered_call("3h", "1min"), a_finished_call("Declined"))
    before = [messenger.call(call) for call in calls]

    result = reap()

    assert isinstance(result, CycleResult)
    assert (result.missed, result.failed, result.poisoned) == (0, 0, 0)
    assert [messenger.call(call) for call in calls] == before
    assert messenger.outbox() == []
    assert len(messenger.cycles()) == 1


def test_a_call_that_nobody_answers_in_time_is_missed_and_its_caller_is_told(messenger: Messenger, reap: Reap) -> None:
    (call,) = messenger.add(a_ringing_call("46s", media_type="Video"))

    result = reap()

    assert isinstance(result, CycleResult)
    assert result.missed == 1
    stored = messenger.call(call)
    assert (stored["status"], stored["end_reason"]) == ("Missed", "Timeout")
    assert stored["ended_at"] == stored["updated_at"] == result.as_of
    (intent,) = messenger.outbox()
    assert (intent["kind"], intent["target_kind"]) == ("CallMissed", "User")
    assert intent["targets"] == [f"user:{call.caller_user_id}"]
    assert intent["payload"] == {"callId": str(call.id), "status": "Missed", "mediaType": "Video"}
    assert (intent["dispatched_at"], intent["attempts"], intent["last_error"]) == (None, 0, None)


def test_the_transition_and_its_outbox_row_are_one_transaction(messenger: Messenger, reap: Reap) -> None:
    messenger.add(a_ringing_call("46s"), an_answered_call("5h", "3h"))
    note_transactions(messenger, "messenger.call_sessions", "messenger.realtime_outbox")

    reap()

    writes = messenger.rows("SELECT * FROM public.writes")
    assert Counter(row["name"] for row in writes) == {"call_sessions": 2, "realtime_outbox": 2}
    assert len({row["transaction"] for row in writes}) == 1


def test_a_call_answered_in_time_is_left_alone(messenger: Messenger, reap: Reap) -> None:
    (call,) = messenger.add(a_ringing_call("44s"))
    messenger.run(ANSWER_CALL, id=call.id)
    messenger.run("UPDATE messenger.call_sessions SET started_at = started_at - interval '10 min'")
    before = messenger.call(call)

    reap()

    assert messenger.call(call) == before
    assert messenger.outbox() == []


def test_an_answered_call_without_a_sign_of_life_fails_and_both_parties_are_told(
    messenger: Messenger, reap: Reap
) -> None:
    (call,) = messenger.add(an_answered_call("5h", "121min"))

    result = reap()

    assert isinstance(result, CycleResult)
    assert result.failed == 1
    stored = messenger.call(call)
    assert (stored["status"], stored["end_reason"], stored["duration_seconds"]) == ("Failed", "Error", None)
    assert stored["ended_at"] == stored["updated_at"] == result.as_of
    (intent,) = messenger.outbox()
    assert intent["kind"] == "CallEnded"
    assert sorted(intent["targets"]) == sorted([f"user:{call.caller_user_id}", f"user:{call.callee_user_id}"])
    assert intent["payload"] == {"callId": str(call.id), "status": "Failed", "mediaType": "Audio"}


def test_a_second_cycle_over_closed_calls_writes_no_second_event(messenger: Messenger, reap: Reap) -> None:
    messenger.add(a_ringing_call("46s"), an_answered_call("5h", "3h"))
    reap()
    closed = messenger.rows("SELECT * FROM messenger.call_sessions ORDER BY id")
    told = messenger.outbox()
    assert len(told) == 2

    result = reap()

    assert isinstance(result, CycleResult)
    assert (result.missed, result.failed) == (0, 0)
    assert messenger.rows("SELECT * FROM messenger.call_sessions ORDER BY id") == closed
    assert messenger.outbox() == told


def test_answer_call_that_commits_before_the_tick_wins(messenger: Messenger, reap: Reap) -> None:
    (call,) = messenger.add(a_ringing_call("46s"))
    messenger.run(ANSWER_CALL, id=call.id)

    reap()

    assert messenger.status(call) == "Answered"
    assert messenger.outbox() == []


def test_a_call_that_answer_call_holds_is_skipped_without_waiting_and_stays_answered(
    messenger: Messenger, reap: Reap
) -> None:
    (call, other) = messenger.add(a_ringing_call("60s"), a_ringing_call("46s"))
    with messenger.holding(ANSWER_CALL, id=call.id) as answering:
        result = reap()
        assert isinstance(result, CycleResult)
        assert (result.missed, sum(result.skipped_locked.values())) == (1, 1)
        answering.commit()

    reap()

    assert messenger.status(call) == "Answered"
    assert messenger.outbox(call) == []
    assert messenger.status(other) == "Missed"


def test_a_call_that_is_claimed_first_is_missed_although_answer_call_comes_before_the_update(
    messenger: Messenger, new_batch: NewBatch
) -> None:
    (call,) = messenger.add(a_ringing_call("46s"))
    batch = new_batch()
    claim = batch.claim()
    assert isinstance(claim, Claim)
    with ThreadPoolExecutor(1) as pool, messenger.engine.connect() as answering:
        answered = pool.submit(command, answering, ANSWER_CALL, call)
        _wait_until_somebody_waits(messenger)
        batch.write_outbox(batch.transition(claim))

        assert answered.result(timeout=10) is False
    assert messenger.status(call) == "Missed"
    assert len(messenger.outbox(call)) == 1


def test_answer_call_wins_when_the_cycle_that_claimed_the_call_is_stopped(
    messenger: Messenger, new_batch: NewBatch, reap: Reap
) -> None:
    (call,) = messenger.add(a_ringing_call("46s"))
    batch = new_batch()
    batch.claim()
    with ThreadPoolExecutor(1) as pool, messenger.engine.connect() as answering:
        answered = pool.submit(command, answering, ANSWER_CALL, call)
        _wait_until_somebody_waits(messenger)
        batch.close()

        assert answered.result(timeout=10) is True
    reap()
    assert messenger.status(call) == "Answered"
    assert messenger.outbox() == []


def test_a_thousand_calls_raced_by_hang_up_have_one_end_each(
    messenger: Messenger, new_batch: NewBatch, measured: Callable[..., None]
) -> None:
    # Oldest first, the order in which both sides work: they meet on every call.
    calls = messenger.add(*(a_ringing_call(f"{1046 - i}s") for i in range(1000)))
    start = threading.Barrier(5)

    def hang_up(share: Sequence[StoredCall]) -> list[StoredCall]:
        with messenger.engine.connect() as connection:
            start.wait(10)
            # The command has more to do than this row: it holds it for a while.
            return [call for call in share if command(connection, END_CALL, call, hold="2ms")]

    def keep_reaping() -> Counter[str]:
        outcome: Counter[str] = Counter()
        start.wait(10)
        while messenger.statuses().get("Ringing"):
            batch = new_batch(batch_size=10, catch_up_batch_size=10)
            claim = batch.claim()
            if isinstance(claim, RunLockBusy):
                outcome["busy"] += 1
                continue
            result = batch.write_outbox(batch.transition(claim))
            outcome["missed"] += result.missed
            outcome["skipped"] += sum(result.skipped_locked.values())
        return outcome

    with ThreadPoolExecutor(5) as pool:
        hang_ups = [pool.submit(hang_up, calls[i::3]) for i in range(3)]
        reapers = [pool.submit(keep_reaping) for _ in range(2)]
        ended = {call.id for future in hang_ups for call in future.result(timeout=120)}
        reaped = sum((future.result(timeout=120) for future in reapers), Counter[str]())

    measured("hang-up and reap", hung_up=len(ended), **reaped)
    statuses = {row["id"]: row["status"] for row in messenger.rows("SELECT id, status FROM messenger.call_sessions")}
    assert {id_ for id_, status in statuses.items() if status == "Ended"} == ended
    missed = {id_ for id_, status in statuses.items() if status == "Missed"}
    assert ended
    assert missed
    assert reaped["skipped"], "no call was ever locked by a hang-up: this was no race"
    assert len(ended) + len(missed) == len(calls)
    assert reaped["missed"] == len(missed)
    assert Counter(row["payload"]["callId"] for row in messenger.outbox()) == Counter(str(id_) for id_ in missed)


def test_of_parallel_instances_one_runs_and_the_backlog_is_closed_once(messenger: Messenger) -> None:
    instances, backlog = 8, 400
    calls = messenger.add(*(a_ringing_call(f"{46 + i}s") for i in range(backlog)))
    spawn = multiprocessing.get_context("spawn")
    barrier, reports = spawn.Barrier(instances), spawn.Queue()
    processes = [
        spawn.Process(target=_reap_in_a_process, args=(messenger, barrier, reports), daemon=True)
        for _ in range(instances)
    ]
    try:
        for process in processes:
            process.start()
        outcomes = [reports.get(timeout=60) for _ in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()

    first = Counter(outcome[0] for outcome in outcomes)
    assert first == {"claimed": 1, "busy": instances - 1}
    assert sum(outcome[1] for outcome in outcomes) == backlog
    assert messenger.statuses() == {"Missed": backlog}
    told = Counter(row["payload"]["callId"] for row in messenger.outbox())
    assert told == Counter(str(call.id) for call in calls)
    assert sum(cycle["missed"] for cycle in messenger.cycles()) == backlog


def test_without_the_run_lock_skip_locked_still_gives_each_call_to_one(messenger: Messenger, reap: Reap) -> None:
    calls = messenger.add(*(a_ringing_call(f"{60 - i}s") for i in range(10)))
    held = [str(call.id) for call in calls[:4]]
    claim_of_a_rival = "SELECT FROM messenger.call_sessions WHERE id = ANY (CAST(:ids AS uuid[])) FOR UPDATE"
    with messenger.holding(claim_of_a_rival, ids=held):
        result = reap()

        assert isinstance(result, CycleResult)
        assert (result.missed, sum(result.skipped_locked.values())) == (6, 4)
        assert {row["payload"]["callId"] for row in messenger.outbox()} == {str(call.id) for call in calls[4:]}

    result = reap()

    assert isinstance(result, CycleResult)
    assert result.missed == 4
    assert len(messenger.outbox()) == len(calls)


def test_a_cycle_stopped_before_its_commit_leaves_nothing_and_the_next_one_closes_the_calls(
    messenger: Messenger, new_batch: NewBatch, reap: Reap
) -> None:
    messenger.add(a_ringing_call("46s"), an_answered_call("5h", "3h"))
    for stop_after in ("claim", "transition"):
        batch = new_batch()
        claim = batch.claim()
        assert isinstance(claim, Claim)
        assert messenger.locks()
        if stop_after == "transition":
            batch.transition(claim)
        batch.close()

        assert messenger.statuses() == {"Ringing": 1, "Answered": 1}
        assert messenger.outbox() == messenger.cycles() == []
        wait_for(lambda: not messenger.locks(), 2, f"the locks to be gone after a stop in {stop_after}")

    reap()
    assert messenger.statuses() == {"Missed": 1, "Failed": 1}
    assert len(messenger.outbox()) == 2


def test_a_cycle_stopped_after_its_commit_is_committed_whole(messenger: Messenger, new_batch: NewBatch) -> None:
    messenger.add(a_ringing_call("46s"), an_answered_call("5h", "3h"))
    batch = new_batch()
    claim = batch.claim()
    assert isinstance(claim, Claim)
    batch.write_outbox(batch.transition(claim))
    batch.close()

    assert messenger.statuses() == {"Missed": 1, "Failed": 1}
    assert len(messenger.outbox()) == 2
    wait_for(lambda: not messenger.locks(), 2, "the locks to be gone")


def _wait_until_somebody_waits(messenger: Messenger) -> None:
    blocked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    wait_for(lambda: messenger.value(blocked), 10, "answer-call to wait for the row")


def _reap_in_a_process(messenger: Messenger, barrier: Barrier, reports: "Queue[Any]") -> None:
    """One instance: all claim at once, and whoever has the lock works only when all others were turned away."""
    name = multiprocessing.current_process().name

    def new_batch(cycle: int) -> ReapBatch:
        options = CallTimeoutReaperOptions(batch_size=20, catch_up_batch_size=20)
        log = logging.getLogger("pin_jobs_tests")
        return ReapBatch(
            messenger.jobs_engine, options, run_id=f"{name}/{cycle}", job_name="call_timeout_reaper", log=log
        )

    barrier.wait(60)
    batch = new_batch(0)
    claim = batch.claim()
    barrier.wait(60)
    first = "claimed" if isinstance(claim, Claim) else "busy"
    closed, cycle = 0, 0
    while True:
        if isinstance(claim, Claim):
            closed += batch.write_outbox(batch.transition(claim)).missed
            if not claim.calls:
                break
        cycle += 1
        batch = new_batch(cycle)
        claim = batch.claim()
    reports.put((first, closed))
