"""Under the daemon: runs that died, froze or wait in the queue do not stop the cycles, nor pile up."""

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus

from pin_jobs_tests.deployment import JOB, UNFINISHED, Deployment, dagster_records, deployment
from pin_jobs_tests.factories import a_ringing_call
from pin_jobs_tests.scenarios.blocking import run_blocked_in
from pin_jobs_tests.waiting import wait_for

POLLING_INTERVAL = 15
LOCK_TTL = 8


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest, server: Any, messenger_template: str) -> Iterator[Deployment]:
    """A short lock_ttl, so that tests need not wait a minute for a run to count as dead."""
    options = {"CALL_TIMEOUT_REAPER_LOCK_TTL": str(LOCK_TTL), "CALL_TIMEOUT_REAPER_MAX_RUN_DURATION": "5"}
    with deployment(request.config, server, messenger_template, **options) as started:
        yield started


@pytest.fixture
def instance(host: Deployment) -> Iterator[DagsterInstance]:
    with dagster_records(host.home, host.environment) as opened:
        yield opened


def test_a_killed_run_is_found_dead_and_the_next_cycle_closes_its_calls(
    host: Deployment, measured: Callable[..., None]
) -> None:
    host.empty()
    with run_blocked_in("transition", host) as blocked:
        (call,) = host.messenger.add(a_ringing_call("46s"))
        session = blocked.wait()
        os.kill(host.dagster.pid(session.run_id), signal.SIGKILL)
        killed = time.monotonic()
    assert host.messenger.status(call) == "Ringing"

    wait_for(lambda: host.messenger.status(call) == "Missed", POLLING_INTERVAL, "the call to be closed")

    measured("from SIGKILL of a run to the next commit", seconds=time.monotonic() - killed)
    host.dagster.wait_for_status(session.run_id, "FAILURE")


def test_a_frozen_run_stops_no_cycle_for_longer_than_lock_ttl(host: Deployment, measured: Callable[..., None]) -> None:
    host.empty()
    with run_blocked_in("transition", host) as blocked:
        (call,) = host.messenger.add(a_ringing_call("46s"))
        session = blocked.wait()
        pid = host.dagster.pid(session.run_id)
        os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()
    try:
        wait_for(lambda: host.messenger.status(call) == "Missed", LOCK_TTL + POLLING_INTERVAL, "the call to be closed")
        measured("from SIGSTOP of a run to the next commit", seconds=time.monotonic() - stopped)

        assert host.dagster.status(session.run_id) == "STARTED"
        (newer, *_) = host.dagster.run_ids()
        assert f"not waiting for {session.run_id}" in host.dagster.run(newer)["tags"]["pin_jobs/due"]
        closed = host.messenger.call(call)
    finally:
        os.kill(pid, signal.SIGCONT)
    host.dagster.wait_for_status(session.run_id, "FAILURE")
    assert host.messenger.call(call) == closed
    assert len(host.messenger.outbox()) == 1
    assert [cycle["run_id"] for cycle in host.messenger.cycles()] == [newer]


def test_a_run_that_is_recorded_as_started_and_is_not_there_stops_no_cycle_for_longer_than_lock_ttl(
    host: Deployment, instance: DagsterInstance
) -> None:
    host.empty()
    ghost = instance.add_run(DagsterRun(job_name=JOB, run_id=str(uuid.uuid4()), status=DagsterRunStatus.STARTED))
    since = time.time()
    (call,) = host.messenger.add(a_ringing_call("46s"))

    wait_for(lambda: host.messenger.status(call) == "Missed", LOCK_TTL + POLLING_INTERVAL, "the call to be closed")

    waited = [tick for tick in host.dagster.ticks() if tick["timestamp"] > since and tick["status"] == "SKIPPED"]
    assert any(f"run {ghost.run_id} is at work since" in tick["skipReason"] for tick in waited)
    assert host.dagster.status(ghost.run_id) == "STARTED"
    instance.delete_run(ghost.run_id)


def test_in_a_full_queue_one_run_waits_and_goes_first_once_there_is_room(
    host: Deployment, instance: DagsterInstance
) -> None:
    host.empty()
    wait_for(lambda: not host.dagster.run_ids(*UNFINISHED), 30, "earlier runs to end")
    others = [
        instance.add_run(DagsterRun(job_name="of_the_host", run_id=str(uuid.uuid4()), status=DagsterRunStatus.STARTED))
        for _ in range(10)
    ]
    before = host.dagster.run_ids()
    (call,) = host.messenger.add(a_ringing_call("46s"))
    (waiting,) = wait_for(lambda: host.dagster.run_ids("QUEUED"), 20, "a run of the reaper to be queued")
    since = time.time()

    waited = wait_for(
        lambda: [tick for tick in host.dagster.ticks() if tick["timestamp"] > since][1:], 30, "two ticks beside it"
    )

    assert all(f"run {waiting} waits in the queue" in tick["skipReason"] for tick in waited)
    assert host.dagster.run_ids() == [waiting, *before]
    for other in others:
        instance.delete_run(other.run_id)
    wait_for(lambda: host.messenger.status(call) == "Missed", POLLING_INTERVAL, "the call to be closed")
    assert host.dagster.run_ids() == [waiting, *before]
