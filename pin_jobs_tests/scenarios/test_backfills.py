"""Under the daemon: backfills by day, beside live cycles that stay punctual; and what is launched by hand."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from pin_jobs.messenger.calls import CallMissedEvent, outbox_row
from pin_jobs_tests.deployment import BACKFILL_JOB, JOB, UNFINISHED, Deployment, deployment
from pin_jobs_tests.factories import a_ringing_call, an_answered_call
from pin_jobs_tests.scenarios.punctuality import seconds_late
from pin_jobs_tests.waiting import wait_for

TODAY = datetime.now(UTC).date()
FIRST_DAY = TODAY - timedelta(days=30)
# The default of backfill_batch_size.
ONE_RUN = 100_000
LARGE = 20_000
# For a backfill on a busy machine. The daemon looks every 30 s: to start its runs, and to see that they have ended.
PATIENCE = 240


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest, server: Any, messenger_template: str) -> Iterator[Deployment]:
    """With its sensor off until a test switches it on, so that the live cycle leaves something to the backfill."""
    variables = {"PIN_JOBS_SENSORS": "stopped", "CALL_TIMEOUT_REAPER_BACKFILL_FIRST_DAY": FIRST_DAY.isoformat()}
    with deployment(request.config, server, messenger_template, **variables) as started:
        yield started


@pytest.fixture(autouse=True)
def quiet(host: Deployment) -> None:
    wait_for(lambda: not host.dagster.runs(*UNFINISHED, job=BACKFILL_JOB), 60, "earlier backfills to end")
    host.empty()


def ago(days: int) -> date:
    return TODAY - timedelta(days=days)


def add_calls(host: Deployment, day: date, count: int, status: str = "Ringing") -> None:
    """Calls that started on this day, all day long, or as far as it has got."""
    host.messenger.add_many(
        count,
        status,
        started_at=f"timestamptz '{day} 00:00:00Z' + i * (least(now() - interval '3 hours', '{day} 23:59Z') "
        f"- timestamptz '{day} 00:00:00Z') / {count}",
    )


def test_the_days_are_those_from_the_first_one_to_today(host: Deployment) -> None:
    days = host.dagster.days()

    assert (days[0], days[-1], len(days)) == (FIRST_DAY.isoformat(), TODAY.isoformat(), 31)
    before = (FIRST_DAY - timedelta(days=1)).isoformat()
    with pytest.raises(AssertionError, match="PartitionKeysNotFoundError"):
        host.dagster.launch_backfill(before)


def test_a_run_without_a_day_of_its_own_fails_in_one_line(host: Deployment) -> None:
    add_calls(host, ago(2), 1)
    wrong = {
        None: "no day was given",
        "2023-12-31": "'2023-12-31' is no day from the first one to today",
        "yesterday": "'yesterday' is no day from the first one to today",
    }

    runs = {key: host.dagster.launch(BACKFILL_JOB, partition=key) for key in wrong}

    advice = "launch the backfill from the job's Partitions tab, or with the tag dagster/partition"
    for key, run in runs.items():
        host.dagster.wait_for_status(run, "FAILURE")
        assert set(host.dagster.errors(run)) == {f"pin_jobs.messenger.ops.NotADay: {wrong[key]}: {advice}"}
    assert host.messenger.statuses() == {"Ringing": 1}


@pytest.mark.slow
def test_a_backfill_closes_the_calls_of_its_days_and_fails_on_one_that_is_more_than_a_run_takes(
    host: Deployment, measured: Callable[..., None]
) -> None:
    huge, small, idle, other = ago(3), ago(4), ago(5), ago(6)
    add_calls(host, huge, ONE_RUN + 7)
    add_calls(host, huge, 5, "Answered")
    add_calls(host, small, 20)
    add_calls(host, other, 3)
    (due_today,) = host.messenger.add(a_ringing_call("46s"))
    started_on = host.messenger.call(due_today)["started_at"].astimezone(UTC).date()

    fails = host.dagster.launch_backfill(huge.isoformat())
    succeeds = host.dagster.launch_backfill(*{day.isoformat() for day in (small, idle, started_on)})
    ended = ("COMPLETED_SUCCESS", "COMPLETED_FAILED")
    wait_for(lambda: host.dagster.backfill(fails)[0] in ended, PATIENCE, "the backfill of the huge day to end")
    wait_for(lambda: host.dagster.backfill(succeeds)[0] in ended, PATIENCE, "the other backfill to end")

    assert host.dagster.backfill(fails) == ("COMPLETED_FAILED", {huge.isoformat(): "FAILURE"})
    status, days = host.dagster.backfill(succeeds)
    assert (status, set(days.values())) == ("COMPLETED_SUCCESS", {"SUCCESS"})
    assert host.messenger.statuses() == {"Missed": ONE_RUN + 21, "Failed": 5, "Ringing": 7 + 3}
    assert host.messenger.status(due_today) == "Missed"
    assert host.messenger.value("SELECT count(*) FROM messenger.realtime_outbox") == ONE_RUN + 26
    assert {str(cycle["partition"]) for cycle in host.messenger.cycles()} == {huge.isoformat(), *days}

    (failed,) = host.dagster.runs("FAILURE", job=BACKFILL_JOB)[:1]
    measured("a day of 100,000 calls in one run", seconds=failed["endTime"] - failed["startTime"])
    assert failed["endTime"] - failed["startTime"] < 120
    error = host.dagster.errors(failed["runId"])[0]
    assert f"committed: {ONE_RUN} missed, 5 failed. Calls of {huge} still due: 7." in error
    assert not [line for line in host.dagster.messages(failed["runId"]) if "rolled back" in line]

    in_part = host.dagster.re_execute(failed["runId"], "FROM_FAILURE")
    whole = host.dagster.re_execute(failed["runId"], "ALL_STEPS")
    host.dagster.wait_for_status(in_part, "FAILURE")
    host.dagster.wait_for_status(whole, "SUCCESS")
    assert "NotAWholeCycle: the three ops share one transaction" in host.dagster.errors(in_part)[0]
    assert host.messenger.statuses() == {"Missed": ONE_RUN + 28, "Failed": 5, "Ringing": 3}


@pytest.mark.slow
def test_beside_a_backfill_of_many_days_live_cycles_go_on_and_go_first(
    host: Deployment, measured: Callable[..., None]
) -> None:
    before = set(host.dagster.run_ids())
    days = [ago(number) for number in range(2, 15)]
    large = days[0]
    for day in days:
        add_calls(host, day, LARGE if day == large else 100)
    at_once: list[tuple[int, int]] = []

    def look_at_the_queue() -> None:
        statuses = [run["status"] for run in host.dagster.runs(*UNFINISHED, job=BACKFILL_JOB)]
        at_once.append((len(statuses) - statuses.count("QUEUED"), statuses.count("QUEUED")))

    with outbox_row_in_the_way(host, large):
        host.dagster.launch_backfill(*(day.isoformat() for day in days), at_once=True)
        wait_for(
            lambda: [s for s in host.sessions(job=BACKFILL_JOB) if s["wait_event_type"] == "Lock"],
            60,
            "the run of the large day to hold all its calls",
        )
        live = host.messenger.add(
            *(
                an_answered_call("5h", f"{7200 - until}s") if until % 3 == 0 else a_ringing_call(f"{45 - until}s")
                for until in range(1, 21)
            )
        )
        with host.dagster.sensor_on():
            late = seconds_late(host, live, timeout=PATIENCE / 2, meanwhile=look_at_the_queue)
        # All of them while the large day's transaction was open and held its calls.
        assert host.messenger.statuses()["Ringing"] >= LARGE
    wait_for(lambda: not host.dagster.runs(*UNFINISHED, job=BACKFILL_JOB), PATIENCE, "the backfill to end")

    measured("seconds from deadline to closed, beside a backfill", median=sorted(late)[10], max=max(late))
    assert min(late) >= 0
    total = LARGE + 12 * 100 + len(live)
    closed = host.messenger.statuses()
    assert (closed.keys(), sum(closed.values())) == ({"Missed", "Failed"}, total)
    assert host.messenger.value("SELECT count(*) FROM messenger.realtime_outbox") == total
    cycles = host.messenger.cycles()
    assert sum(cycle["missed"] + cycle["failed"] for cycle in cycles) == total
    assert [cycle["missed"] for cycle in cycles if cycle["partition"] == large.isoformat()] == [LARGE]
    assert LARGE in {cycle["skipped_locked_ring_timeout"] for cycle in cycles if cycle["partition"] is None}

    assert max(working for working, waiting in at_once if waiting) == 2
    backfills = host.dagster.runs(job=BACKFILL_JOB)[: len(days)]
    assert {run["status"] for run in backfills} == {"SUCCESS"}
    # A live run goes ahead of the days that were asked for before it and still wait.
    (*_, first) = [run for run in host.dagster.runs() if run["runId"] not in before]
    assert any(run["creationTime"] < first["creationTime"] < first["startTime"] < run["startTime"] for run in backfills)


@contextmanager
def outbox_row_in_the_way(host: Deployment, day: date) -> Iterator[None]:
    """Another session holds the outbox row of a call of this day; who closes the call waits before the commit."""
    (call, *_) = host.messenger.rows(
        "SELECT id, media_type, caller_user_id FROM messenger.call_sessions "
        "WHERE (started_at AT TIME ZONE 'UTC')::date = :day LIMIT 1",
        day=day,
    )
    intent = outbox_row(CallMissedEvent(call["id"], call["media_type"], call["caller_user_id"]))
    with host.messenger.holding(
        "INSERT INTO messenger.realtime_outbox (id, kind, target_kind, targets, payload) "
        "VALUES (:id, 'CallMissed', 'User', '{}', '{}')",
        id=intent.id,
    ):
        yield


@pytest.mark.parametrize(
    ("run_config", "words"),
    [
        ({"batch_size": 0}, "batch_size is 0; allowed is 1 to 10000"),
        ({"batch_size": -1}, "batch_size is -1; allowed is 1 to 10000"),
        ({"batch_size": 10_001}, "batch_size is 10001; allowed is 1 to 10000"),
        ({"batch_size": "x"}, 'Value "x"'),
        ({"batch_size": 2.5}, 'Value "2.5"'),
        ({"batch_size": True}, 'Value "True"'),
        ({"dry_run": "yes"}, 'Value "yes"'),
        ({"batchsize": 5}, 'unexpected config entry "batchsize"'),
    ],
)
def test_a_nonsense_value_is_refused_before_there_is_a_run(
    host: Deployment, run_config: dict[str, Any], words: str
) -> None:
    before = host.dagster.run_ids()

    answer = host.dagster.try_to_launch(run_config=run_config)

    assert answer["__typename"] in {"RunConfigValidationInvalid", "PythonError"}
    (error,) = answer.get("errors", [answer])
    assert words in error["message"]
    assert "unexpected error" not in error["message"]
    assert host.dagster.run_ids() == before


def test_a_dry_run_of_a_few_calls_can_be_launched_by_hand(host: Deployment) -> None:
    add_calls(host, ago(1), 5)

    run = host.dagster.launch(JOB, run_config={"dry_run": True, "batch_size": 2})

    host.dagster.wait_for_status(run, "SUCCESS")
    assert host.dagster.run(run)["tags"]["pin_jobs/dry_run"] == "true"
    assert any("(dry run, rolled back): 2 missed" in message for message in host.dagster.messages(run))
    assert host.messenger.statuses() == {"Ringing": 5}
    assert host.messenger.cycles() == []
