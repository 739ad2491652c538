"""A worker is killed, frozen or cut off at every point of a cycle in turn; one cycle later all is as it should be."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import pytest

from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs_tests.conftest import Server
from pin_jobs_tests.factories import Messenger, a_ringing_call, an_answered_call
from pin_jobs_tests.proxy import Side
from pin_jobs_tests.scenarios.crashing import (
    LOCK_OUT_CLAIMS,
    Crash,
    Fault,
    Point,
    Workers,
    Workload,
    points_of,
    run_cycle,
)
from pin_jobs_tests.waiting import wait_for

# Killed workers keep the machine busy; the others are waited for meanwhile.
AT_ONCE = {Fault.KILLED: 4, Fault.FROZEN: 24, Fault.CUT_OFF: 16}
DUE = (*(a_ringing_call(f"{50 + n}s") for n in range(2)), *(an_answered_call("5h", "3h") for _ in range(2)))
NOT_DUE = (a_ringing_call("-1h"), an_answered_call("5h", "1h"))
CONTRADICTORY = a_ringing_call("9min", end_reason="Hangup")
REJECTED = a_ringing_call("9min")
REJECTS = f"""
    CREATE FUNCTION messenger.reject() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'this call stays'; END $$;
    CREATE TRIGGER reject BEFORE UPDATE ON messenger.call_sessions
    FOR EACH ROW WHEN (OLD.id = '{REJECTED.id}') EXECUTE FUNCTION messenger.reject()
"""
# Every fault at every point of every workload: one more line here is all it takes.
WORKLOADS = (Workload("healthy calls and poison", DUE, (*NOT_DUE, CONTRADICTORY, REJECTED), host_sql=REJECTS),)


@pytest.fixture(scope="module")
def workers() -> Workers:
    return Workers()


@pytest.fixture
def databases(server: Server, messenger_template: str, workload: Workload) -> Iterator["queue.Queue[Messenger]"]:
    """As many as workers may crash at once: each needs a run lock of its own."""
    free: queue.Queue[Messenger] = queue.Queue()
    with ExitStack() as stack:
        for _ in range(sum(AT_ONCE.values())):
            name = server.create(messenger_template)
            stack.callback(server.drop, name)
            messenger = server.messenger(name)
            if workload.host_sql:
                messenger.run(workload.host_sql)
            free.put(messenger)
        yield free


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_a_worker_that_stops_anywhere_leaves_nothing_half_done_and_nothing_behind(
    workers: Workers, databases: "queue.Queue[Messenger]", workload: Workload, measured: Callable[..., None]
) -> None:
    def crash(point: Point, fault: Fault) -> str | None:
        messenger = databases.get()
        try:
            Crash(messenger, workers, workload, fault).at(point, is_committed=_is_committed(point, requests))
        except AssertionError as error:
            return f"{fault.value} {point}: {error}"
        finally:
            databases.put(messenger)
        return None

    requests = Crash(databases.queue[0], workers, workload, Fault.KILLED).rehearse()
    tried, failures = {}, []
    with ExitStack() as pools:
        started = {}
        for fault, at_once in AT_ONCE.items():
            pool = pools.enter_context(ThreadPoolExecutor(at_once))
            started[fault] = [pool.submit(crash, point, fault) for point in points_of(requests, fault)]
        for fault, results in started.items():
            tried[fault.name.lower()] = len(results)
            failures += filter(None, (result.result() for result in results))

    measured(f"crash points tried, {workload.name}", **tried, requests_of_a_cycle=len(requests))
    assert not failures, f"{len(failures)} of {sum(tried.values())} points:\n" + "\n".join(failures)


def test_a_worker_frozen_while_the_server_sends_to_it_is_ended_by_the_next_cycle(
    workers: Workers, messenger: Messenger
) -> None:
    # More than any connection holds of what nobody reads: the server waits in a write, where none of its limits counts.
    due = 5000
    messenger.run(
        "INSERT INTO messenger.call_sessions SELECT gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), "
        "repeat('x', 3000), 'Ringing', NULL, now() - interval '1 hour', NULL, NULL, NULL, now() "
        "FROM generate_series(1, :n)",
        n=due,
    )
    options = CallTimeoutReaperOptions(
        batch_size=due, catch_up_batch_size=due, lock_ttl=timedelta(seconds=3), max_run_duration=timedelta(seconds=2.9)
    )
    session = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND usename <> current_user AND "
    with workers.start(messenger.jobs_url, options) as worker:
        with messenger.holding(LOCK_OUT_CLAIMS):
            wait_for(lambda: messenger.rows(session + "wait_event_type = 'Lock'"), 10, "the worker to claim")
            worker.freeze()
        expired = "wait_event = 'ClientWrite' AND xact_start < clock_timestamp() - interval '3 s'"
        wait_for(lambda: messenger.rows(session + expired), 10, "the server to wait for longer than lock_ttl")
        assert messenger.locks()

        kind, said = run_cycle(messenger.jobs_url, replace(options, batch_size=10, catch_up_batch_size=10), "next")

        assert kind == "committed", said
        worker.thaw()
        kind, said = worker.report()
    assert kind == "failed", said
    assert "\n" not in said
    assert messenger.statuses() == {"Missed": 10, "Ringing": due - 10}
    assert len(messenger.outbox()) == 10
    assert [cycle["run_id"] for cycle in messenger.cycles()] == ["next"]
    assert messenger.locks() == []


def _is_committed(point: Point, requests: list[str]) -> bool:
    """Whether the server has got the last COMMIT by then, with nothing in its way."""
    commit = max(number for number, statement in enumerate(requests) if statement == "COMMIT")
    arrives = point.side is Side.AFTER or point.on_its_way
    return point.hindrance is None and (point.request > commit or (point.request == commit and arrives))
