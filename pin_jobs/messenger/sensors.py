"""The sensor that starts a cycle when a call is due: a look through the partial index, every few seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from dagster import (
    DagsterInstance,
    DagsterRunStatus,
    DefaultSensorStatus,
    JobDefinition,
    RunRecord,
    RunRequest,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    sensor,
)
from sqlalchemy import Engine

from pin_jobs.database import clear_errors
from pin_jobs.messenger.calls import RETRY_DELAYS
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.messenger.transaction import DATABASE, QUERIES, QUERIES_WITHOUT_SCHEMA
from pin_jobs.moments import moment
from pin_jobs.resources.postgres import PostgresResource

DUE_TAG: Final = "pin_jobs/due"
# The daemon looks at its sensors every five seconds; an interval one second short of a multiple hits the grid.
_DAEMON_GRID: Final = timedelta(seconds=5)
_PROBE_TIMEOUT_MS: Final = "3000"
# For a server that cannot keep to its own limit, because it is frozen.
_ANSWER_TIMEOUT: Final = timedelta(seconds=5)
_WAITING: Final = (DagsterRunStatus.QUEUED,)
_AT_WORK: Final = (
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
)


@dataclass(frozen=True, slots=True)
class Probe:
    """What a look at the active calls found, by the database's clock."""

    now: datetime
    due: int
    next_deadline: datetime | None


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A run of the job that Dagster holds for unfinished; `since` is when it started, or last changed its status."""

    run_id: str
    is_queued: bool
    since: datetime


def interval_seconds(polling_interval: timedelta) -> int:
    """`minimum_interval_seconds` for a tick every third of the polling interval, rounded down to the daemon's grid.

    A third, so that tick, launch and work together stay inside one polling interval.
    """
    ticks = max(1, polling_interval / 3 // _DAEMON_GRID)
    return int(ticks * _DAEMON_GRID.total_seconds()) - 1


def decide(
    probe: Probe, unfinished: Sequence[Unfinished], lock_ttl: timedelta, now: datetime
) -> RunRequest | SkipReason:
    """Whether to start a cycle. `now` is Dagster's clock, by which `unfinished` was timed.

    Never while one waits in the queue, which a stalled queue would fill up with, nor while one is at work; but one
    that started longer than `lock_ttl` ago, or further ahead than that, can hold no lock any more: dead, or its clock
    is wrong, and either way the run lock decides.
    """
    if probe.due == 0:
        if probe.next_deadline is None:
            return SkipReason("No call is active.")
        return SkipReason(f"No call is due; the next deadline is {moment(probe.next_deadline)}.")
    for run in unfinished:
        if run.is_queued:
            return SkipReason(
                f"{_calls(probe.due)} due; run {run.run_id} waits in the queue since {moment(run.since)}."
            )
        if abs(now - run.since) <= lock_ttl:
            return SkipReason(f"{_calls(probe.due)} due; run {run.run_id} is at work since {moment(run.since)}.")
    late = probe.now - probe.next_deadline if probe.next_deadline else timedelta(0)
    # Short: the list of runs shows some thirty characters of it.
    reason = f"{'1 call' if probe.due == 1 else f'{probe.due} calls'}, {late.total_seconds():.1f} s late"
    if unfinished:
        reason += (
            f"; not waiting for {', '.join(run.run_id for run in unfinished)}, unfinished for longer than lock_ttl"
        )
    return RunRequest(tags={DUE_TAG: reason})


def build_call_timeout_reaper_sensor(
    job: JobDefinition, options: CallTimeoutReaperOptions, *, running: bool
) -> SensorDefinition:
    """The sensor of the live cycle; `running` is its state until somebody switches it in the UI."""

    interval = interval_seconds(options.polling_interval)

    @sensor(
        name=f"{job.name}_sensor",
        job=job,
        minimum_interval_seconds=interval,
        default_status=DefaultSensorStatus.RUNNING if running else DefaultSensorStatus.STOPPED,
        description=f"Looks every {interval + 1} s whether a call is due, and starts a cycle unless one is under way. "
        "A tick that finds nothing makes no run; its reason names the next deadline.",
    )
    def call_timeout_reaper_sensor(
        context: SensorEvaluationContext, messenger_database: PostgresResource
    ) -> RunRequest | SkipReason:
        engine = messenger_database.engine(f"{job.name}_sensor", answer_timeout=_ANSWER_TIMEOUT)
        probe = look_at_calls(engine, options)
        # Dagster's instance is the dearer question by far: only asked when the answer matters.
        unfinished = find_unfinished(context.instance, job.name, _location_name(context)) if probe.due else []
        return decide(probe, unfinished, options.lock_ttl, datetime.now(UTC))

    return call_timeout_reaper_sensor


def look_at_calls(engine: Engine, options: CallTimeoutReaperOptions) -> Probe:
    """One statement, bounded to three seconds on the server.

    Raises:
        DatabaseUnavailable, DatabaseRefused: the tick fails with that line, and the next one looks again.
    """
    with clear_errors(DATABASE), engine.connect() as connection:
        session = connection.execute(QUERIES["bound_probe"], {"timeout": _PROBE_TIMEOUT_MS}).one()
        row = connection.execute(
            (QUERIES if session.has_schema else QUERIES_WITHOUT_SCHEMA)["probe"],
            {
                "ring_timeout": options.ring_timeout,
                "stale_answered_timeout": options.stale_answered_timeout,
                "longest_delay": RETRY_DELAYS[-1],
            },
        ).one()
        return Probe(row.now, row.due, row.next_deadline)


def find_unfinished(instance: DagsterInstance, job_name: str, location_name: str | None) -> list[Unfinished]:
    """The runs of the job, in this code location, that are queued or in progress."""
    records = instance.get_run_records(RunsFilter(job_name=job_name, statuses=[*_WAITING, *_AT_WORK]), limit=50)
    return [_unfinished(record) for record in records if _is_from(record, location_name)]


def _unfinished(record: RunRecord) -> Unfinished:
    # start_time is what the run's own process reported; before that, the last change of the status: it may have waited
    # in the queue for long and be on its way only now.
    since = datetime.fromtimestamp(record.start_time, UTC) if record.start_time else record.update_timestamp
    return Unfinished(record.dagster_run.run_id, record.dagster_run.status in _WAITING, since)


def _is_from(record: RunRecord, location_name: str | None) -> bool:
    # Another code location of the host may have a job of this name, for another database.
    origin = record.dagster_run.remote_job_origin
    return origin is None or location_name is None or origin.location_name == location_name


def _location_name(context: SensorEvaluationContext) -> str | None:
    origin = context.code_location_origin
    return origin.location_name if origin else None


def _calls(count: int) -> str:
    return "1 call is" if count == 1 else f"{count} calls are"
