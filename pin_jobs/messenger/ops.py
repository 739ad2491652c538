"""The three ops of a cycle. They share one open transaction; `write_outbox` commits it."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from datetime import date, timedelta
from typing import Any, Final, cast

from dagster import (
    DagsterError,
    Failure,
    Field,
    InitResourceContext,
    OpExecutionContext,
    Out,
    Output,
    ResourceDefinition,
    ResourceParam,
    TableMetadataValue,
    TimeWindowPartitionsDefinition,
    op,
    resource,
)

from pin_jobs.errors import PinJobsError
from pin_jobs.messenger.batch import (
    BACKFILL_PATIENCE,
    Claim,
    CycleResult,
    ReapBatch,
    RunLockBusy,
    TransitionedBatch,
)
from pin_jobs.messenger.calls import Call, Phase, outbox_row
from pin_jobs.messenger.isolation import Poison
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.moments import moment
from pin_jobs.resources.op_outputs import PARTITION_TAG, is_whole, table
from pin_jobs.resources.postgres import PostgresResource

LOCK_BUSY_TAG: Final = "pin_jobs/lock_busy"
DRY_RUN_TAG: Final = "pin_jobs/dry_run"
DRY_RUN_MEANS: Final = "Do everything, show what it would come to, and roll it back."


class NotADay(PinJobsError, DagsterError):
    """A run of the backfill was launched without a day, or for one that is no partition of it."""

    # An error of Dagster's too, here and below: Dagster shows those as they are and wraps all others.

    def __init__(self, key: str | None) -> None:
        wrong = "no day was given" if key is None else f"{key!r} is no day from the first one to today"
        super().__init__(f"{wrong}: launch the backfill from the job's Partitions tab, or with the tag {PARTITION_TAG}")


class NotAWholeCycle(PinJobsError, DagsterError):
    """Some of the three ops were to run without the others: a subset, or again "from failure"."""

    def __init__(self) -> None:
        super().__init__(
            "the three ops share one transaction and work together only: launch, or re-execute, all of them"
        )


def reap_batch_resource(
    options: CallTimeoutReaperOptions, days: TimeWindowPartitionsDefinition | None = None
) -> ResourceDefinition:
    """The run's `ReapBatch`; with `days`, a backfill of the run's day. Tear-down only ever rolls back.

    Dagster resumes this generator as if nothing had happened after a failure or Terminate, so committing here would
    commit a failed run.
    """

    config_schema = {"dry_run": Field(bool, default_value=False, description=DRY_RUN_MEANS)}
    if days is None:
        config_schema["batch_size"] = Field(int, is_required=False, description="Calls per phase.")

    @resource(
        required_resource_keys={"messenger_database"},
        config_schema=config_schema,
        description="The one transaction that the three ops of a cycle share.",
    )
    def reap_batch(context: InitResourceContext) -> Generator[ReapBatch, None, None]:
        run = context.run
        if run is None or context.log is None:
            raise RuntimeError("reap_batch works inside a run only")
        if not is_whole(run, (claim.name, transition.name, write_outbox.name)):
            raise NotAWholeCycle
        database = cast(PostgresResource, context.resources.messenger_database)
        batch_size, is_dry_run = context.resource_config.get("batch_size"), context.resource_config["dry_run"]
        # A server that is silent for that long has lost the batch, and the run would wait for it for ever.
        answer_timeout = options.lock_ttl * (BACKFILL_PATIENCE if days else 1)
        batch = ReapBatch(
            database.engine(run.job_name, answer_timeout=answer_timeout),
            # A number that a person gives is meant: no catching up beyond it.
            replace(options, batch_size=batch_size, catch_up_batch_size=batch_size) if batch_size else options,
            run_id=run.run_id,
            job_name=run.job_name,
            log=context.log,
            day=_day(days, run.tags.get(PARTITION_TAG)) if days else None,
            is_dry_run=is_dry_run,
        )
        if is_dry_run and context.instance is not None:
            context.instance.add_run_tags(run.run_id, {DRY_RUN_TAG: "true"})
        try:
            yield batch
        finally:
            batch.close()

    return reap_batch


@op(
    description="Take the run lock, claim the calls that are due, oldest first, at most one batch a phase, and keep "
    "them locked for the ops that follow.",
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
    rows = ((call.id, call.phase, moment(call.started_at), _seconds(claimed.overdue(call))) for call in claimed.calls)
    yield Output(
        claimed,
        metadata={
            "as_of": moment(claimed.as_of),
            **{f"{phase}_claimed": _count(claimed.calls, phase) for phase in Phase},
            **{f"{phase}_skipped_locked": claimed.skipped_locked[phase] for phase in Phase},
            "remaining": sum(claimed.remaining.values()),
            "retries": len(claimed.attempts),
            "waiting_in_quarantine": sum(claimed.in_quarantine.values()),
            "calls": table(_CLAIMED_COLUMNS, rows),
        },
    )


@op(config_schema={}, description="Decide what becomes of each claimed call, Missed or Failed, and write it.")
def transition(reap_batch: ResourceParam[ReapBatch], claimed: Claim) -> Output[TransitionedBatch]:
    """Second op: decide and write the new states."""
    batch = reap_batch.transition(claimed)
    changes = ((t.before.id, t.phase, t.before.status, t.after.status, t.after.end_reason) for t in batch.transitions)
    return Output(
        batch,
        metadata={
            "missed": sum(t.phase is Phase.RING_TIMEOUT for t in batch.transitions),
            "failed": sum(t.phase is Phase.STALE_ANSWERED for t in batch.transitions),
            "poisoned": len(batch.poisoned),
            "calls": table(_TRANSITION_COLUMNS, changes),
            **_poison_table(batch.poisoned),
        },
    )


@op(
    config_schema={},
    description="Write one push intent per closed call and the record of the cycle; then commit what the three ops "
    "did or, in a dry run, roll it back.",
)
def write_outbox(
    context: OpExecutionContext, reap_batch: ResourceParam[ReapBatch], transitioned: TransitionedBatch
) -> Output[None]:
    """Last op: the outbox, then the one commit of the cycle.

    A backfill that leaves calls of its day fails once it has committed: nobody else comes back for them, and this is
    what the page of the backfill shows. Calls that somebody else holds are his, and no failure.
    """
    result = reap_batch.write_outbox(transitioned)
    metadata = cycle_metadata(result)
    if context.has_partition_key and result.is_committed and result.remaining:
        raise Failure(
            f"committed: {result.missed} missed, {result.failed} failed. Calls of {context.partition_key} still due: "
            f"{result.remaining}. Launch the day again (or: Re-execute all)",
            metadata=metadata,
            allow_retries=False,
        )
    return Output(None, metadata=metadata)


def cycle_metadata(result: CycleResult) -> dict[str, Any]:
    """What a cycle did, for the UI: counts, the push intents, and the quarantine if the cycle added to it."""
    intents = ((t.before.id, outbox_row(t.event)) for t in result.closed)
    rows = ((call_id, intent.kind, ", ".join(intent.targets), intent.id) for call_id, intent in intents)
    in_quarantine = (
        (item.call_id, item.phase, item.attempts, moment(item.first_seen), moment(item.next_attempt), item.last_error)
        for item in result.quarantine
    )
    return {
        **({} if result.is_committed else {"dry_run": "all of this was rolled back"}),
        "committed": result.is_committed,
        "missed": result.missed,
        "failed": result.failed,
        "poisoned": result.poisoned,
        "skipped_locked": sum(result.skipped_locked.values()),
        "remaining": result.remaining,
        "cycle_seconds": _seconds(result.duration),
        "outbox_rows": table(_OUTBOX_COLUMNS, rows),
        **_poison_table(result.poison),
        **({"quarantine": table(_QUARANTINE_COLUMNS, in_quarantine)} if result.quarantine else {}),
    }


_CLAIMED_COLUMNS: Final = ("call_id", "phase", "started_at", "overdue_seconds")
_TRANSITION_COLUMNS: Final = ("call_id", "phase", "status_before", "status", "end_reason")
_POISON_COLUMNS: Final = ("call_id", "phase", "reason")
_QUARANTINE_COLUMNS: Final = ("call_id", "phase", "attempts", "first_seen", "next_attempt", "last_error")
_OUTBOX_COLUMNS: Final = ("call_id", "kind", "targets", "outbox_id")


def _day(days: TimeWindowPartitionsDefinition, key: str | None) -> date:
    # Dagster lets runs of a partitioned job start without a partition, and with any key.
    if key is None or not days.has_partition_key(key):
        raise NotADay(key)
    return date.fromisoformat(key)


def _poison_table(poisoned: Sequence[Poison]) -> dict[str, TableMetadataValue]:
    rows = ((item.call.id, item.call.phase, item.reason) for item in poisoned)
    return {"poisoned_calls": table(_POISON_COLUMNS, rows)} if poisoned else {}


def _count(calls: Iterable[Call], phase: Phase) -> int:
    return sum(call.phase is phase for call in calls)


def _seconds(duration: timedelta) -> float:
    return round(duration.total_seconds(), 3)
