"""The graph of a cycle and the job that people and the sensor launch."""

from typing import Final

from dagster import JobDefinition, graph, in_process_executor, mem_io_manager

from pin_jobs.messenger.ops import claim, reap_batch_resource, transition, write_outbox
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.resources.postgres import PostgresResource

JOB_NAME: Final = "call_timeout_reaper"
# Ahead of ordinary runs (0) in the queue: fifteen seconds are promised, and a cycle takes two.
PRIORITY: Final = "10"


@graph(
    description="Close the calls that nobody closed: ringing too long becomes Missed, answered without a sign of life "
    "becomes Failed, and each leaves its push intent in the outbox. The three ops share one transaction."
)
def reap_calls() -> None:
    """One cycle: claim, transition, write_outbox."""
    write_outbox(transition(claim()))


def build_call_timeout_reaper(options: CallTimeoutReaperOptions, database: PostgresResource) -> JobDefinition:
    """The live cycle, with the options it works by as the job's metadata.

    All in one process, because the ops share a transaction. No run retries, whatever the host's default is: they would
    start half a transaction again, and the next cycle is the retry.
    """
    return reap_calls.to_job(
        name=JOB_NAME,
        executor_def=in_process_executor,
        resource_defs={
            "io_manager": mem_io_manager,
            "messenger_database": database,
            "reap_batch": reap_batch_resource(options),
        },
        tags={
            "dagster/max_retries": "0",
            "dagster/priority": PRIORITY,
            # A cycle is over after lock_ttl. A run that Dagster holds for started long after that is dead.
            "dagster/max_runtime": str(int(2 * options.lock_ttl.total_seconds()) + 60),
        },
        metadata=options.in_words(),
    )
