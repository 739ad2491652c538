"""Under the daemon, with every option at its default: a backlog is closed in a few large cycles, both phases of it."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pin_jobs_tests.deployment import UNFINISHED, Deployment, deployment
from pin_jobs_tests.waiting import wait_for

CATCH_UP_BATCH_SIZE = 5000


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest, server: Any, messenger_template: str) -> Iterator[Deployment]:
    with deployment(request.config, server, messenger_template) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ringing", "silent", "cycles"),
    [(10_000, 10_000, 2), (19_990, 10, 4)],
    ids=["of both phases alike", "nearly all of one phase"],
)
def test_twenty_thousand_calls_due_at_once_are_closed_in_as_few_cycles_as_they_take(
    host: Deployment, measured: Callable[..., None], ringing: int, silent: int, cycles: int
) -> None:
    wait_for(lambda: not host.dagster.run_ids(*UNFINISHED), 60, "earlier runs to end")
    host.empty()
    # In one statement, else a cycle may find a part of them.
    host.messenger.run(
        "INSERT INTO messenger.call_sessions "
        "(id, caller_user_id, callee_user_id, media_type, status, started_at, updated_at) "
        "SELECT gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 'Audio', "
        "CASE WHEN i <= :ringing THEN 'Ringing' ELSE 'Answered' END, at, at "
        "FROM (SELECT i, now() - interval '5 hours' + i * interval '0.1 s' AS at "
        "FROM generate_series(1, :count) AS i) AS due",
        ringing=ringing,
        count=ringing + silent,
    )
    inserted = time.monotonic()

    wait_for(lambda: host.messenger.statuses().keys() == {"Missed", "Failed"}, 200, "the backlog to be closed")

    measured("20,000 calls due at once", seconds=time.monotonic() - inserted)
    assert host.messenger.statuses() == {"Missed": ringing, "Failed": silent}
    # A tick that looks just before the last commit may ask for one more cycle, which finds nothing.
    at_work = [cycle for cycle in host.messenger.cycles() if cycle["missed"] + cycle["failed"]]
    assert len(at_work) == cycles
    assert [cycle["missed"] for cycle in at_work] == portions(ringing, cycles)
    assert [cycle["failed"] for cycle in at_work] == portions(silent, cycles)
    assert host.messenger.value("SELECT count(*) FROM messenger.realtime_outbox") == ringing + silent


def portions(count: int, cycles: int) -> list[int]:
    """What each cycle takes of so many calls of a phase."""
    return [min(CATCH_UP_BATCH_SIZE, max(0, count - done * CATCH_UP_BATCH_SIZE)) for done in range(cycles)]
