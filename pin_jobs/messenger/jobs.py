"""The graph of a cycle, and its two jobs: the live cycle and the backfill."""

from typing import Any, Final

from dagster import (
    ConfigMapping,
    DagsterError,
    DailyPartitionsDefinition,
    Field,
    JobDefinition,
    ResourceDefinition,
    TimeWindowPartitionsDefinition,
    graph,
    in_process_executor,
)

from pin_jobs.errors import PinJobsError
from pin_jobs.messenger.batch import patient
from pin_jobs.messenger.ops import DRY_RUN_MEANS, claim, reap_batch_resource, transition, write_outbox
from pin_jobs.messenger.options import LARGEST_BATCH, CallTimeoutReaperOptions
from pin_jobs.resources.postgres import PostgresResource
from pin_jobs.resources.run_memory import run_memory

JOB_NAME: Final = "call_timeout_reaper"
BACKFILL_JOB_NAME: Final = "call_timeout_reaper_backfill"
# Ahead of ordinary runs (0) in the queue: fifteen seconds are promised, and a cycle takes two.
PRIORITY: Final = "10"
# Behind them: nobody waits for a backfill by the second.
BACKFILL_PRIORITY: Final = "-10"
# For a limit on how many backfill runs work at once: our dagster.yaml has one.
BACKFILL_TAG: Final = "pin_jobs/backfill"
_BACKFILL: Final = (
    "Close the calls that nobody closed, those of one day at a time (by when they started, in UTC), beside the live "
    "cycle. To start it, pick days in the Partitions tab. A day that was never picked shows as missing: that says "
    "nothing about its calls. When more calls of a day are due than one run takes, the run commits what it did and "
    "fails so that it shows: launch the day again."
)


class InvalidRunConfig(PinJobsError, DagsterError):
    """What a person wrote in the launchpad is out of its range, of which Dagster's types know nothing."""

    # An error of Dagster's too, because Dagster shows those as they are and wraps all others.


@graph(
    description="Close the calls that nobody closed: ringing too long becomes Missed, answered without a sign of life "
    "becomes Failed, and each leaves its push intent in the outbox. The three ops share one transaction."
)
def reap_calls() -> None:
    """One cycle: claim, transition, write_outbox."""
    write_outbox(transition(claim()))


def build_call_timeout_reaper(options: CallTimeoutReaperOptions, database: PostgresResource) -> JobDefinition:
    """The live cycle, with the options it works by as the job's metadata.

    By hand, its run config takes `dry_run` and `batch_size`; a bad value is refused before there is a run
    (`InvalidRunConfig`, or Dagster's own error where the type is wrong).
    """
    return _build(
        JOB_NAME,
        reap_batch_resource(options),
        options,
        database,
        config=_by_hand(options),
        tags={"dagster/priority": PRIORITY, **_time_limit(options)},
    )


def build_call_timeout_reaper_backfill(options: CallTimeoutReaperOptions, database: PostgresResource) -> JobDefinition:
    """The same for the calls that started on one day (UTC), from `backfill_first_day` to today."""
    # The day that has just begun is a partition too.
    days = DailyPartitionsDefinition(start_date=options.backfill_first_day.isoformat(), timezone="UTC", end_offset=1)
    return _build(
        BACKFILL_JOB_NAME,
        reap_batch_resource(options, days),
        options,
        database,
        days=days,
        description=_BACKFILL,
        tags={"dagster/priority": BACKFILL_PRIORITY, BACKFILL_TAG: JOB_NAME, **_time_limit(patient(options))},
    )


def _build(  # noqa: PLR0913  # all but four by name
    name: str,
    batch: ResourceDefinition,
    options: CallTimeoutReaperOptions,
    database: PostgresResource,
    *,
    tags: dict[str, str],
    description: str | None = None,
    config: ConfigMapping | None = None,
    days: TimeWindowPartitionsDefinition | None = None,
) -> JobDefinition:
    """A job of the graph.

    All in one process, because the ops share a transaction. No run retries, whatever the host's default is: they would
    start half a transaction again, and the next cycle is the retry.
    """
    return reap_calls.to_job(
        name=name,
        description=description,
        executor_def=in_process_executor,
        resource_defs={"io_manager": run_memory, "messenger_database": database, "reap_batch": batch},
        config=config,
        partitions_def=days,
        tags={"dagster/max_retries": "0", **tags},
        metadata=options.in_words(),
    )


def _time_limit(options: CallTimeoutReaperOptions) -> dict[str, str]:
    # A cycle is over after lock_ttl. A run that Dagster holds for started long after that is dead.
    return {"dagster/max_runtime": str(int(2 * options.lock_ttl.total_seconds()) + 60)}


def _by_hand(options: CallTimeoutReaperOptions) -> ConfigMapping:
    """What a person may say in the launchpad, in two lines."""
    allowed = f"1 to {LARGEST_BATCH}"

    def run_config(config: dict[str, Any]) -> dict[str, Any]:
        batch_size = config.get("batch_size")
        if batch_size is not None and not 1 <= batch_size <= LARGEST_BATCH:
            raise InvalidRunConfig(f"batch_size is {batch_size}; allowed is {allowed}")
        return {"resources": {"reap_batch": {"config": config}}}

    return ConfigMapping(
        config_fn=run_config,
        config_schema={
            "dry_run": Field(bool, default_value=False, description=DRY_RUN_MEANS),
            "batch_size": Field(
                int,
                is_required=False,
                description=f"Calls per phase, {allowed}. When left out: {options.batch_size}, and up to "
                f"{options.catch_up_batch_size} when more are due.",
            ),
        },
    )
