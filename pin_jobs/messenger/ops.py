"""The three ops of a cycle. They share one open transaction; `write_outbox` commits it."""

from collections.abc import Generator, Iterable, Sequence
from datetime import timedelta
from itertools import islice
from typing import Final, cast

from dagster import (
    InitResourceContext,
    MetadataValue,
    OpExecutionContext,
    Out,
    Output,
    ResourceDefinition,
    ResourceParam,
    TableColumn,
    TableMetadataValue,
    TableRecord,
    TableSchema,
    op,
    resource,
)

from pin_jobs.messenger.batch import Claim, ReapBatch, RunLockBusy, TransitionedBatch, moment
from pin_jobs.messenger.calls import Call, Phase, outbox_row
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.resources.postgres import PostgresResource

LOCK_BUSY_TAG: Final = "pin_jobs/lock_busy"
# A table is one row of Dagster's event log: enough to look at, not enough to hurt.
LONGEST_TABLE: Final = 500


def reap_batch_resource(options: CallTimeoutReaperOptions) -> ResourceDefinition:
    """The run's `ReapBatch`. Tear-down only ever rolls back.

    Dagster resumes this generator as if nothing had happened after a failure or Terminate, so committing here would
    commit a failed run.
    """

    @resource(
        required_resource_keys={"messenger_database"},
        description="The one transaction that the three ops of a cycle share.",
    )
    def reap_batch(context: InitResourceContext) -> Generator[ReapBatch, None, None]:
        run = context.run
        if run is None or context.log is None:
            raise RuntimeError("reap_batch works inside a run only")
        database = cast(PostgresResource, context.resources.messenger_database)
        batch = ReapBatch(
            database.engine(run.job_name), options, run_id=run.run_id, job_name=run.job_name, log=context.log
        )
        try:
            yield batch
        finally:
            batch.close()

    return reap_batch


@op(
    description="Take the run lock and claim the calls that are due, oldest first, at most batch_size a phase.",
    config_schema={},
    out=Out(Claim, is_required=False, description="Nothing, when another cycle holds the run lock."),
)
def claim(context: OpExecutionContext, reap_batch: ResourceParam[ReapBatch]) -> Generator[Output[Claim], None, None]:
    """First op: lock what is due, or say who is at work."""
    claimed = reap_batch.claim()
    if isinstance(claimed, RunLockBusy):
        context.log.warning("cycle skipped: %s. Nothing is lost, the next cycle finds the same calls.", claimed)
        context.instance.add_run_tags(context.run_id, {LOCK_BUSY_TAG: str(claimed)})
        return
    rows = [(call.id, call.phase, moment(call.started_at), _seconds(claimed.overdue(call))) for call in claimed.calls]
    yield Output(
        claimed,
        metadata={
            "as_of": moment(claimed.as_of),
            "ring_timeout_claimed": _count(claimed.calls, Phase.RING_TIMEOUT),
            "ring_timeout_skipped_locked": claimed.skipped_locked[Phase.RING_TIMEOUT],
            "stale_answered_claimed": _count(claimed.calls, Phase.STALE_ANSWERED),
            "stale_answered_skipped_locked": claimed.skipped_locked[Phase.STALE_ANSWERED],
            "calls": _table(_CLAIMED_COLUMNS, rows),
        },
    )


@op(config_schema={}, description="Decide what becomes of each claimed call, Missed or Failed, and write it.")
def transition(reap_batch: ResourceParam[ReapBatch], claimed: Claim) -> Output[TransitionedBatch]:
    """Second op: decide and write the new states."""
    batch = reap_batch.transition(claimed)
    changes = [(t.before.id, t.phase, t.before.status, t.after.status, t.after.end_reason) for t in batch.transitions]
    poisoned = [(item.call.id, item.call.phase, item.reason) for item in batch.poisoned]
    of_poison = {"poisoned_calls": _table(_POISON_COLUMNS, poisoned)} if poisoned else {}
    return Output(
        batch,
        metadata={
            "missed": sum(t.phase is Phase.RING_TIMEOUT for t in batch.transitions),
            "failed": sum(t.phase is Phase.STALE_ANSWERED for t in batch.transitions),
            "poisoned": len(poisoned),
            "calls": _table(_TRANSITION_COLUMNS, changes),
            **of_poison,
        },
    )


@op(
    config_schema={},
    description="Write one push intent per closed call and the record of the cycle, and commit everything.",
)
def write_outbox(reap_batch: ResourceParam[ReapBatch], transitioned: TransitionedBatch) -> Output[None]:
    """Last op: the outbox, then the one commit of the cycle."""
    result = reap_batch.write_outbox(transitioned)
    intents = [(t.before.id, outbox_row(t.event)) for t in transitioned.transitions]
    rows = [(call_id, intent.kind, ", ".join(intent.targets), intent.id) for call_id, intent in intents]
    return Output(
        None,
        metadata={
            "committed": True,
            "missed": result.missed,
            "failed": result.failed,
            "poisoned": result.poisoned,
            "skipped_locked": sum(result.skipped_locked.values()),
            "cycle_seconds": _seconds(result.duration),
            "outbox_rows": _table(_OUTBOX_COLUMNS, rows),
        },
    )


_CLAIMED_COLUMNS: Final = ("call_id", "phase", "started_at", "overdue_seconds")
_TRANSITION_COLUMNS: Final = ("call_id", "phase", "status_before", "status", "end_reason")
_POISON_COLUMNS: Final = ("call_id", "phase", "reason")
_OUTBOX_COLUMNS: Final = ("call_id", "kind", "targets", "outbox_id")


def _count(calls: Iterable[Call], phase: Phase) -> int:
    return sum(call.phase is phase for call in calls)


def _seconds(duration: timedelta) -> float:
    return round(duration.total_seconds(), 3)


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> TableMetadataValue:
    """The first rows as a table of the UI; the counts beside it tell how many there are in all."""
    records = [
        TableRecord(
            {name: value if isinstance(value, float) else str(value) for name, value in zip(columns, row, strict=True)}
        )
        for row in islice(rows, LONGEST_TABLE)
    ]
    schema = TableSchema(
        columns=[TableColumn(name, "float" if name.endswith("_seconds") else "string") for name in columns]
    )
    return MetadataValue.table(records, schema)
