"""Under the daemon, with Dagster's records in PostgreSQL: punctual when calls are due, idle when none is."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pin_jobs.moments import moment
from pin_jobs_tests.deployment import UNFINISHED, Deployment, deployment, percentile
from pin_jobs_tests.factories import a_finished_call, a_ringing_call, an_answered_call
from pin_jobs_tests.scenarios.punctuality import POLLING_INTERVAL, deadline_of, seconds_late
from pin_jobs_tests.waiting import wait_for

# What is measured is the promise, not what else the machine has to do.
pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest, server: Any, messenger_template: str) -> Iterator[Deployment]:
    """With every option at its default."""
    with deployment(request.config, server, messenger_template) as started:
        yield started


def test_while_nothing_is_due_ticks_say_when_the_next_deadline_is_and_make_no_run(host: Deployment) -> None:
    host.empty()
    (next_due, *_) = host.messenger.add(
        an_answered_call("5h", "1h"), a_ringing_call("-1h"), a_ringing_call("-2h"), a_finished_call("Ended", "5h")
    )
    deadline = deadline_of(host, next_due)
    since = time.time()

    skipped = wait_for(
        lambda: [tick for tick in host.dagster.ticks() if tick["timestamp"] > since][1:], 30, "two ticks of the sensor"
    )

    for tick in skipped:
        assert tick["status"] == "SKIPPED", tick
        assert tick["skipReason"] == f"No call is due; the next deadline is {moment(deadline)}."
    assert host.dagster.run_ids() == []
    assert host.sessions() == []


@pytest.mark.slow
def test_every_call_is_closed_within_the_polling_interval_of_its_deadline(
    host: Deployment, measured: Callable[..., None]
) -> None:
    host.empty()
    seconds_until_due = [5 + i * 60 / 40 for i in range(40)]
    calls = host.messenger.add(
        *(
            an_answered_call("5h", f"{7200 - until}s") if i % 4 == 0 else a_ringing_call(f"{45 - until}s")
            for i, until in enumerate(seconds_until_due)
        )
    )
    bystanders = host.messenger.add(a_ringing_call("-5min"), an_answered_call("9h", "1h"), a_finished_call("Declined"))
    untouched = [host.messenger.call(call) for call in bystanders]

    lateness = seconds_late(host, calls, timeout=5 + 60 + POLLING_INTERVAL + 10)

    measured(
        "seconds from deadline to closed",
        p50=percentile(lateness, 0.5),
        p90=percentile(lateness, 0.9),
        p99=percentile(lateness, 0.99),
        max=max(lateness),
    )
    assert min(lateness) >= 0
    # All of them where the machine has nothing else to do.
    assert percentile(lateness, 0.9) <= POLLING_INTERVAL
    assert [host.messenger.call(call) for call in bystanders] == untouched
    assert len(host.messenger.outbox()) == len(calls)
    assert sum(cycle["missed"] + cycle["failed"] for cycle in host.messenger.cycles()) == len(calls)
    wait_for(lambda: not host.dagster.run_ids(*UNFINISHED), 15, "the last run to end")
    assert host.dagster.run_ids() == host.dagster.run_ids("SUCCESS")
