"""More is due than a cycle takes: the oldest go first, and neither phase, nor anybody's lock, holds up the rest."""

from collections.abc import Callable

from pin_jobs.messenger.batch import CycleResult, RunLockBusy
from pin_jobs_tests.factories import Messenger, a_ringing_call, an_answered_call

Reap = Callable[..., CycleResult | RunLockBusy]
# No larger batches for a backlog: the slowest way to work one off.
STRICT = {"batch_size": 20, "catch_up_batch_size": 20}


def test_after_six_hours_without_a_cycle_both_phases_advance_in_every_cycle(messenger: Messenger, reap: Reap) -> None:
    ringing = messenger.add(*(a_ringing_call(f"{360 - n}min") for n in range(120)))
    answered = messenger.add(*(an_answered_call(f"{540 - n}min", f"{480 - n}min") for n in range(60)))

    for cycle in range(6):
        result = reap(**STRICT)

        assert isinstance(result, CycleResult)
        assert (result.missed, result.failed) == (20, 20 if cycle < 3 else 0)
        active = {row["id"] for row in messenger.rows("SELECT id FROM messenger.call_sessions WHERE ended_at IS NULL")}
        left = [*ringing[20 * (cycle + 1) :], *answered[20 * (cycle + 1) :]]
        assert active == {call.id for call in left}
    assert len(messenger.outbox()) == 180


def test_a_flood_of_ringing_calls_does_not_keep_answered_ones_from_failing(messenger: Messenger, reap: Reap) -> None:
    messenger.add(*(an_answered_call("9h", "8h") for _ in range(50)))

    for cycle in range(3):
        messenger.add(*(a_ringing_call("46s") for _ in range(30)))
        reap(**STRICT)
        assert messenger.statuses().get("Answered", 0) == max(0, 50 - 20 * (cycle + 1))

    assert messenger.statuses()["Ringing"] == 30


def test_the_oldest_calls_held_by_somebody_do_not_hold_up_those_behind_them(messenger: Messenger, reap: Reap) -> None:
    held = messenger.add(*(a_ringing_call(f"{360 - n}min") for n in range(50)))
    behind = messenger.add(*(a_ringing_call(f"{60 - n}min") for n in range(30)))
    lock = "SELECT FROM messenger.call_sessions WHERE id = ANY (CAST(:ids AS uuid[])) FOR UPDATE"
    with messenger.holding(lock, ids=[str(call.id) for call in held]):
        results = [reap(**STRICT) for _ in range(2)]

    assert [messenger.status(call) for call in behind] == ["Missed"] * 30
    for result, missed in zip(results, (20, 10), strict=True):
        assert isinstance(result, CycleResult)
        assert (result.missed, sum(result.skipped_locked.values())) == (missed, 50)
