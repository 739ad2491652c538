"""After many failures, runs and ticks: no lock, no session, no connection and no file is left behind."""

import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from dagster import DagsterInstance, Definitions, EnvVar, SensorEvaluationContext, SkipReason, sensor
from dagster._core.definitions.repository_definition import RepositoryDefinition
from dagster._core.remote_origin import RegisteredCodeLocationOrigin
from dagster._grpc.impl import get_external_sensor_execution

from pin_jobs.database import LOCK_NAMESPACE, DatabaseRefused
from pin_jobs.messenger.batch import LIVE_CYCLE_LOCK, Claim, CycleResult, ReapBatch, RunLockBusy
from pin_jobs.messenger.jobs import build_call_timeout_reaper
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.messenger.sensors import build_call_timeout_reaper_sensor, look_at_calls
from pin_jobs.resources.postgres import PostgresResource
from pin_jobs_tests.conftest import JOBS_ROLE
from pin_jobs_tests.factories import Messenger, a_ringing_call, an_answered_call
from pin_jobs_tests.scenarios.breaking import broken
from pin_jobs_tests.waiting import wait_for

NewBatch = Callable[..., ReapBatch]
Reap = Callable[..., CycleResult | RunLockBusy]
SENSOR = "call_timeout_reaper_sensor"
TAKE_RUN_LOCK = f"SELECT pg_advisory_xact_lock({LOCK_NAMESPACE}, {LIVE_CYCLE_LOCK})"


class Interruption(BaseException):
    """As Terminate comes: no Exception."""


def test_fifty_batches_that_raise_in_the_middle_leave_no_lock_and_no_session(
    messenger: Messenger, new_batch: NewBatch, reap: Reap
) -> None:
    calls = messenger.add(*(a_ringing_call(f"{46 + n}s") for n in range(5)), an_answered_call("5h", "3h"))

    def raise_in_database(table: str) -> None:
        with broken(messenger, table), pytest.raises(DatabaseRefused, match="the host is broken"):
            run_until("write_outbox")

    def raise_after(step: str, error: BaseException) -> None:
        with pytest.raises(type(error)):
            run_until(step, error)

    def run_until(step: str, error: BaseException | None = None) -> None:
        with closing(new_batch()) as batch:
            claim = batch.claim()
            assert isinstance(claim, Claim), claim
            if step == "claim" and error:
                raise error
            transitioned = batch.transition(claim)
            if step == "transition" and error:
                raise error
            batch.write_outbox(transitioned)

    for _ in range(10):
        raise_in_database("messenger.call_sessions")
        raise_in_database("messenger.realtime_outbox")
        raise_in_database("pin_jobs.reaper_cycles")
        raise_after("claim", RuntimeError("in op claim"))
        raise_after("transition", Interruption())

    assert messenger.locks() == []
    messenger.rows("SELECT FROM messenger.call_sessions FOR UPDATE NOWAIT")
    wait_for(lambda: _sessions_of_the_jobs(messenger) == 0, 5, "the last session to be gone")
    assert [messenger.status(call) for call in calls] == ["Ringing"] * 5 + ["Answered"]
    assert messenger.outbox() == messenger.cycles() == []
    result = reap()
    assert isinstance(result, CycleResult)
    assert (result.missed, result.failed) == (5, 1)


def test_a_hundred_cycles_and_ticks_leave_as_much_open_as_before(
    messenger: Messenger, new_batch: NewBatch, database: PostgresResource
) -> None:
    options = CallTimeoutReaperOptions()
    job = build_call_timeout_reaper(options, database)

    with DagsterInstance.ephemeral() as instance:

        def run(n: int) -> bool:
            """Every tenth cycle as a whole run of Dagster's, every tenth fails, every tenth finds the lock held."""
            if n % 10 == 0:
                return job.execute_in_process({"dry_run": n % 20 == 0}, instance=instance).success
            with ExitStack() as hindrances, closing(new_batch()) as batch:
                if n % 10 == 1:
                    hindrances.enter_context(broken(messenger, "messenger.realtime_outbox"))
                if n % 10 == 2:
                    hindrances.enter_context(messenger.holding(TAKE_RUN_LOCK))
                try:
                    claim = batch.claim()
                    return isinstance(claim, Claim) and bool(batch.write_outbox(batch.transition(claim)))
                except DatabaseRefused:
                    return False

        def tick_and_run(n: int) -> bool:
            messenger.add(a_ringing_call("46s"))
            assert look_at_calls(messenger.jobs_engine, options).due
            return run(n)

        for n in range(3):
            tick_and_run(n)
        before = _open_in_this_process()
        outcomes = [tick_and_run(n) for n in range(100)]

        assert outcomes.count(False) == 20
        wait_for(lambda: _sessions_of_the_jobs(messenger) == 0, 5, "all sessions to be gone")
        after = _open_in_this_process()
        # Fewer is no leak: what an earlier test left may have been cleared away meanwhile.
        assert all(now <= then for now, then in zip(after, before, strict=True)), f"{before} before, {after} after"
    assert messenger.statuses() == {"Missed": 103}
    assert len(messenger.outbox()) == 103


def test_many_skipped_ticks_leave_no_file(tick: Callable[[str], Any], home: Path) -> None:
    tick(SENSOR)
    before = set(home.rglob("*"))

    reasons = {tick(SENSOR).skip_message for _ in range(40)}

    assert reasons == {"No call is active."}
    assert set(home.rglob("*")) == before
    # Were ours to log anything, this is what it would leave.
    tick("talkative_sensor")
    assert set(home.rglob("*")) > before


@pytest.fixture
def database(pin_jobs_environment: dict[str, str]) -> PostgresResource:
    assert pin_jobs_environment
    return PostgresResource(url=EnvVar("MESSENGER_DATABASE_URL"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """DAGSTER_HOME, with the folder for temporary files in it."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return tmp_path


@pytest.fixture
def tick(database: PostgresResource, home: Path) -> Iterator[Callable[[str], Any]]:
    """Makes a sensor tick as a code server does when the daemon asks it to, each tick with a log of its own."""
    options = CallTimeoutReaperOptions()
    job = build_call_timeout_reaper(options, database)

    @sensor(job=job)
    def talkative_sensor(context: SensorEvaluationContext) -> SkipReason:
        context.log.info("nothing to do")
        return SkipReason("nothing to do")

    ours = build_call_timeout_reaper_sensor(job, options, running=True)
    definitions = Definitions(jobs=[job], sensors=[ours, talkative_sensor], resources={"messenger_database": database})
    repository: RepositoryDefinition = definitions.get_repository_def()
    with DagsterInstance.local_temp(str(home)) as instance:
        ticks = iter(range(10_000))

        def evaluate(name: str) -> Any:
            return get_external_sensor_execution(
                repository,
                RegisteredCodeLocationOrigin("pin_jobs"),
                instance.get_ref(),
                name,
                last_tick_completion_timestamp=None,
                last_run_key=None,
                cursor=None,
                log_key=[repository.name, name, str(next(ticks))],
                last_sensor_start_timestamp=None,
            )

        yield evaluate


def _sessions_of_the_jobs(messenger: Messenger) -> int:
    return int(
        messenger.value(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename = :role",
            role=JOBS_ROLE,
        )
    )


def _open_in_this_process() -> tuple[int, int, int]:
    """Files, connections and threads that are open, without those that only wait to be cleared away."""
    gc.collect()
    process = psutil.Process(os.getpid())
    return process.num_fds(), len(process.net_connections("all")), threading.active_count()
