"""Commands of the messenger that meet a cycle on the same calls: one winner each, and nobody gets an error."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import pytest
from sqlalchemy import text

from pin_jobs.messenger.batch import Claim, CycleResult, ReapBatch, RunLockBusy
from pin_jobs_tests.factories import Messenger, StoredCall, a_ringing_call, an_answered_call
from pin_jobs_tests.scenarios.host_commands import ANSWER_CALL, DECLINE_CALL, END_CALL, SIGN_OF_LIFE, command
from pin_jobs_tests.waiting import wait_for

NewBatch = Callable[..., ReapBatch]
Reap = Callable[..., CycleResult | RunLockBusy]

every_command = pytest.mark.parametrize(
    ("due", "sql", "status"),
    [
        pytest.param(lambda: a_ringing_call("46s"), ANSWER_CALL, "Answered", id="answer"),
        pytest.param(lambda: a_ringing_call("46s"), END_CALL, "Ended", id="hang up while it rings"),
        pytest.param(lambda: a_ringing_call("46s"), DECLINE_CALL, "Declined", id="decline"),
        pytest.param(lambda: an_answered_call("5h", "3h"), END_CALL, "Ended", id="hang up"),
        pytest.param(lambda: an_answered_call("5h", "3h"), SIGN_OF_LIFE, "Answered", id="sign of life"),
    ],
)


@every_command
def test_a_command_that_has_the_call_first_wins_and_nobody_is_told_otherwise(
    messenger: Messenger, reap: Reap, due: Callable[[], StoredCall], sql: str, status: str
) -> None:
    call, other = messenger.add(due(), due())
    with messenger.holding(sql, id=call.id) as rival:
        result = reap()
        assert isinstance(result, CycleResult)
        assert sum(result.skipped_locked.values()) == 1
        rival.commit()
    after_the_command = messenger.call(call)

    reap()

    assert after_the_command["status"] == status
    assert messenger.call(call) == after_the_command
    assert messenger.outbox(call) == []
    assert messenger.status(other) in ("Missed", "Failed")
    assert len(messenger.outbox(other)) == 1


@pytest.mark.parametrize("pause", ["before the update", "before the outbox"])
@every_command
def test_a_command_that_comes_after_the_claim_waits_and_finds_the_call_closed(
    messenger: Messenger, new_batch: NewBatch, due: Callable[[], StoredCall], sql: str, status: str, pause: str
) -> None:
    assert status
    (call,) = messenger.add(due())
    batch = new_batch()
    claim = batch.claim()
    assert isinstance(claim, Claim)
    transitioned = batch.transition(claim) if pause == "before the outbox" else None
    with ThreadPoolExecutor(1) as pool, messenger.engine.connect() as rival:
        done = pool.submit(command, rival, sql, call)
        _wait_until_somebody_waits(messenger)
        result = batch.write_outbox(transitioned or batch.transition(claim))

        assert done.result(timeout=10) is False
    assert messenger.call(call)["ended_at"] == result.as_of
    assert messenger.status(call) == ("Missed" if call.status == "Ringing" else "Failed")
    assert len(messenger.outbox(call)) == 1


def test_a_rival_in_the_opposite_order_and_a_cycle_never_deadlock_and_lose_nothing(
    messenger: Messenger, new_batch: NewBatch, measured: Callable[..., None]
) -> None:
    rounds = 500
    calls = messenger.add(*(a_ringing_call(f"{2000 - n}s") for n in range(1000)))
    messenger.run("ALTER TABLE messenger.call_sessions ADD touched integer NOT NULL DEFAULT 0")
    # What the reaper claims next, or has claimed just now.
    oldest = text("SELECT id FROM messenger.call_sessions WHERE status = 'Ringing' ORDER BY started_at LIMIT 8")
    touch = text("UPDATE messenger.call_sessions SET touched = touched + 1 WHERE id = :id")
    is_over = threading.Event()

    def run_against_the_reaper() -> Counter[UUID]:
        touched: Counter[UUID] = Counter()
        with messenger.engine.connect() as connection:
            for _ in range(rounds):
                with connection.begin():
                    newest_first = list(reversed(connection.scalars(oldest).all())) or [call.id for call in calls[:8]]
                    for id_ in newest_first:
                        connection.execute(touch, {"id": id_})
                touched.update(newest_first)
        return touched

    def keep_reaping() -> Counter[str]:
        outcome: Counter[str] = Counter()
        while not is_over.is_set() or messenger.statuses().get("Ringing"):
            # A few at a time, so that there are enough for all rounds; then the rest.
            size = 200 if is_over.is_set() else 4
            batch = new_batch(batch_size=size, catch_up_batch_size=size)
            claim = batch.claim()
            assert isinstance(claim, Claim)
            result = batch.write_outbox(batch.transition(claim))
            outcome.update(missed=result.missed, skipped=sum(result.skipped_locked.values()), poisoned=result.poisoned)
        return outcome

    with ThreadPoolExecutor(2) as pool:
        reaper = pool.submit(keep_reaping)
        try:
            touched = pool.submit(run_against_the_reaper).result(timeout=120)
        finally:
            is_over.set()
        reaped = reaper.result(timeout=60)

    measured("a rival in the opposite order", rounds=rounds, **reaped)
    assert reaped["skipped"], "no call was ever locked by the rival: they did not meet"
    assert messenger.statuses() == {"Missed": len(calls)}
    assert (reaped["missed"], reaped["poisoned"]) == (len(calls), 0)
    stored = messenger.rows("SELECT id, touched FROM messenger.call_sessions WHERE touched > 0")
    assert {row["id"]: row["touched"] for row in stored} == touched
    assert Counter(row["payload"]["callId"] for row in messenger.outbox()) == Counter(_ids(calls))


def test_a_rival_that_deletes_calls_in_one_statement_waits_for_the_cycle_or_is_first(
    messenger: Messenger, new_batch: NewBatch
) -> None:
    calls = messenger.add(*(a_ringing_call(f"{60 - n}s") for n in range(6)))
    purge = "DELETE FROM messenger.call_sessions WHERE id = ANY (CAST(:ids AS uuid[]))"
    with messenger.holding(purge, ids=_ids(calls[:2])) as first:
        batch = new_batch()
        claim = batch.claim()
        assert isinstance(claim, Claim)
        assert [call.id for call in claim.calls] == [call.id for call in calls[2:]]
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(messenger.run, purge, ids=_ids(calls[2:4]))
            _wait_until_somebody_waits(messenger)
            result = batch.write_outbox(batch.transition(claim))
            late.result(timeout=10)
        first.commit()

    assert (result.missed, result.poisoned, sum(result.skipped_locked.values())) == (4, 0, 2)
    assert messenger.statuses() == {"Missed": 2}
    # The push tells what was true when the cycle committed.
    assert {row["payload"]["callId"] for row in messenger.outbox()} == set(_ids(calls[2:]))


def _ids(calls: Sequence[StoredCall]) -> list[str]:
    return [str(call.id) for call in calls]


def _wait_until_somebody_waits(messenger: Messenger) -> None:
    blocked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    wait_for(lambda: messenger.value(blocked), 10, "a rival to wait for the row")
