"""A run stopped in each of its ops: the batch rolls back, its locks are free, the next cycle closes the calls."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pin_jobs_tests.deployment import Deployment, deployment
from pin_jobs_tests.factories import StoredCall, a_ringing_call, an_answered_call
from pin_jobs_tests.scenarios.blocking import run_blocked_in
from pin_jobs_tests.waiting import wait_for

LOCKS_GONE_WITHIN = 2.0


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest, server: Any, messenger_template: str) -> Iterator[Deployment]:
    """Its sensor is off: these runs are launched by hand."""
    with deployment(request.config, server, messenger_template, PIN_JOBS_SENSORS="stopped") as started:
        yield started


@pytest.mark.parametrize("op", ["claim", "transition", "write_outbox"])
def test_terminate_in_the_ui_cancels_the_run_and_frees_everything(
    host: Deployment, op: str, measured: Callable[..., None]
) -> None:
    calls = _two_due_calls(host)
    with run_blocked_in(op, host) as blocked:
        run_id = host.dagster.launch()
        session = blocked.wait()
        assert host.locks_of(session.pid)
        host.dagster.terminate(run_id)
        seconds = _wait_until_gone(host, session.pid)

        measured(f"locks gone after Terminate in {op}", seconds=seconds)
        assert seconds <= LOCKS_GONE_WITHIN
        host.dagster.wait_for_status(run_id, "CANCELED")
    _assert_rolled_back(host, calls, run_id)
    _assert_that_the_next_cycle_closes(host, calls)


def test_terminate_inside_a_statement_that_takes_long_ends_it_on_the_server(
    host: Deployment, measured: Callable[..., None]
) -> None:
    calls = _two_due_calls(host)
    with run_blocked_in("transition", host, asleep=True) as blocked:
        run_id = host.dagster.launch()
        session = blocked.wait()
        host.dagster.terminate(run_id)
        seconds = _wait_until_gone(host, session.pid)

        measured("locks gone after Terminate in a long statement", seconds=seconds)
        assert seconds <= LOCKS_GONE_WITHIN
        host.dagster.wait_for_status(run_id, "CANCELED")
    _assert_rolled_back(host, calls, run_id)
    _assert_that_the_next_cycle_closes(host, calls)


@pytest.mark.parametrize("asleep", [False, True], ids=["behind a lock", "in a long statement"])
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL], ids=lambda stop: stop.name)
def test_a_signal_to_the_process_of_a_run_frees_everything(
    host: Deployment, stop: signal.Signals, asleep: bool, measured: Callable[..., None]
) -> None:
    calls = _two_due_calls(host)
    with run_blocked_in("transition", host, asleep=asleep) as blocked:
        run_id = host.dagster.launch()
        session = blocked.wait()
        os.kill(host.dagster.pid(run_id), stop)
        seconds = _wait_until_gone(host, session.pid)

        where = "in a long statement" if asleep else "behind a lock"
        measured(f"locks gone after {stop.name} {where}", seconds=seconds)
        assert seconds <= LOCKS_GONE_WITHIN
        host.dagster.wait_for_status(run_id, "FAILURE")
    _assert_rolled_back(host, calls, run_id)
    _assert_that_the_next_cycle_closes(host, calls)


def test_terminate_of_a_run_that_waits_in_the_queue_or_starts_leaves_no_trace(host: Deployment) -> None:
    calls = _two_due_calls(host)
    run_id = host.dagster.launch()
    host.dagster.terminate(run_id)

    host.dagster.wait_for_status(run_id, "CANCELED")

    _assert_rolled_back(host, calls, run_id)
    _assert_that_the_next_cycle_closes(host, calls)


def _two_due_calls(host: Deployment) -> list[StoredCall]:
    host.empty()
    return list(host.messenger.add(a_ringing_call("60s"), an_answered_call("5h", "3h")))


def _wait_until_gone(host: Deployment, pid: int) -> float:
    """Seconds until the session, and so every lock of it, is gone from the server."""
    since = time.monotonic()
    left = "SELECT pid FROM pg_stat_activity WHERE pid = :pid UNION ALL SELECT pid FROM pg_locks WHERE pid = :pid"
    wait_for(lambda: not host.messenger.rows(left, pid=pid), 30, "the session of the run and its locks to be gone")
    return time.monotonic() - since


def _assert_rolled_back(host: Deployment, calls: list[StoredCall], run_id: str) -> None:
    assert [host.messenger.status(call) for call in calls] == [call.status for call in calls]
    assert host.messenger.outbox() == host.messenger.cycles() == []
    assert host.sessions(run_id) == []


def _assert_that_the_next_cycle_closes(host: Deployment, calls: list[StoredCall]) -> None:
    host.dagster.wait_for_status(host.dagster.launch(), "SUCCESS")
    assert [host.messenger.status(call) for call in calls] == ["Missed", "Failed"]
    assert len(host.messenger.outbox()) == len(calls)
