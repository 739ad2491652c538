"""The three ops of a check. Nothing is held open between them: leases and short transactions keep others away."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, cast

from dagster import (
    AssetKey,
    AssetObservation,
    DagsterError,
    Failure,
    Field,
    InitResourceContext,
    OpExecutionContext,
    Output,
    ResourceDefinition,
    ResourceParam,
    TableMetadataValue,
    op,
    resource,
)

from pin_jobs.chathouse.checks import Checked, ChecksFailed, OperatorChecks
from pin_jobs.chathouse.dialogs import Outcome, PairResult
from pin_jobs.chathouse.options import PostChatMailOptions
from pin_jobs.errors import PinJobsError
from pin_jobs.resources.dialog_api import DialogApiResource
from pin_jobs.resources.op_outputs import PARTITION_TAG, is_whole, table
from pin_jobs.resources.postgres import PostgresResource
from pin_jobs.resources.redis import RedisResource

CHECKS_ASSET: Final = AssetKey("operator_checks")


class NoOperator(PinJobsError, DagsterError):
    """A run of the backfill was launched without an operator."""

    # An error of Dagster's too, here and below: Dagster shows those as they are and wraps all others.

    def __init__(self) -> None:
        super().__init__(
            f"no operator was given: launch the backfill from the job's Partitions tab, or with the tag {PARTITION_TAG}"
        )


class NotAWholeCheck(PinJobsError, DagsterError):
    """Some of the three ops were to run without the others: a subset, or again "from failure"."""

    def __init__(self) -> None:
        super().__init__(
            "the three ops of a check share its leases and work together only: launch, or re-execute, all of them"
        )


@dataclass(frozen=True, slots=True)
class Order:
    """What a run was asked for: `operators`, or all that are at work for `None`."""

    operators: Sequence[str] | None
    only_due: bool = False
    stopped_too: bool = False
    wait_for_lease: timedelta = timedelta(0)


@dataclass(frozen=True, slots=True)
class RunningChecks:
    """The run's checks, and what they were asked for."""

    checks: OperatorChecks
    order: Order


def operator_checks_resource(options: PostChatMailOptions, *, is_backfill: bool) -> ResourceDefinition:
    """The run's `RunningChecks`. Tear-down gives back the leases that a failure or Terminate left."""

    by_hand = {
        "operators": Field([str], default_value=[], description="Operators to check; all at work when empty."),
        "only_due": Field(bool, default_value=False, description="Leave out those that are not due by now."),
    }

    @resource(
        required_resource_keys={"chathouse_database", "redis", "dialog_api"},
        # The operator of a backfill is its partition.
        config_schema={} if is_backfill else by_hand,
        description="The operators that this run holds, and what was found out about their chats.",
    )
    def operator_checks(context: InitResourceContext) -> Generator[RunningChecks, None, None]:
        run = context.run
        if run is None or context.log is None:
            raise RuntimeError("operator_checks works inside a run only")
        if not is_whole(run, (find_candidates.name, check_mail_limits.name, create_tasks.name)):
            raise NotAWholeCheck
        if is_backfill:
            if PARTITION_TAG not in run.tags:
                raise NoOperator
            # A lease runs out by itself, so waiting longer than one is never needed.
            order = Order(
                [run.tags[PARTITION_TAG]], stopped_too=True, wait_for_lease=options.lease_ttl + timedelta(seconds=5)
            )
        else:
            order = Order(context.resource_config["operators"] or None, only_due=context.resource_config["only_due"])
        database = cast(PostgresResource, context.resources.chathouse_database)
        dialog_api = cast(DialogApiResource, context.resources.dialog_api)
        with (
            dialog_api.connect() as api,
            cast(RedisResource, context.resources.redis).store(context.log) as store,
        ):
            checks = OperatorChecks(
                database.engine(f"{run.job_name}/{run.run_id}"[:63], answer_timeout=options.lease_ttl),
                options,
                api=api,
                bounds=dialog_api.bounds(options.dialog_api_stage_timeout),
                store=store,
                log=context.log,
            )
            try:
                yield RunningChecks(checks, order)
            finally:
                checks.close()

    return operator_checks


@op(
    config_schema={},
    description="Take the operators, and find their chats that no mail followed: all that the database can decide.",
)
def find_candidates(operator_checks: ResourceParam[RunningChecks]) -> Output[Checked]:
    """First op: leases and set-based statements."""
    order = operator_checks.order
    checked = operator_checks.checks.find_candidates(
        order.operators,
        only_due=order.only_due,
        stopped_too=order.stopped_too,
        wait_for_lease=order.wait_for_lease,
    )
    left_out = table(("operator_id", "reason"), checked.left_out.items())
    return Output(
        checked,
        metadata={
            "operators": len(checked.operators),
            "left_out": len(checked.left_out),
            **_outcomes(checked),
            "pairs": _pairs(checked.results),
            **({"operators_left_out": left_out} if checked.left_out else {}),
        },
    )


@op(
    config_schema={},
    description="Ask Redis and then the dialog API, all pairs at once and bounded, whether the lady may still write.",
)
def check_mail_limits(operator_checks: ResourceParam[RunningChecks], found: Checked) -> Output[Checked]:
    """Second op: nothing of the database is held while the dialog API is asked."""
    checked = operator_checks.checks.check_mail_limits(found)
    asked = [result for result in checked.results if result.outcome in _ASKED]
    return Output(checked, metadata={**_outcomes(checked), "pairs": _pairs(asked)})


@op(
    config_schema={},
    description="Write the tasks, one short transaction per operator, and show them in the operators' stores.",
)
def create_tasks(
    context: OpExecutionContext, operator_checks: ResourceParam[RunningChecks], limits: Checked
) -> Output[None]:
    """Last op: looks again at what forbids a task, then writes it. Fails when an operator could not be checked."""
    checked = operator_checks.checks.create_tasks(limits)
    for operator in checked.operators:
        context.log_event(_observation(checked, operator.operator_id))
    metadata: dict[str, Any] = {
        "operators": len(checked.operators),
        **_outcomes(checked),
        "pairs": _pairs(checked.results),
    }
    if checked.failures:
        failed = table(("operator_id", "reason"), checked.failures.items())
        raise Failure(
            description=str(ChecksFailed(checked.failures)),
            metadata={**metadata, "failed_operators": failed},
            allow_retries=False,
        )
    return Output(None, metadata=metadata)


_ASKED: Final = (Outcome.CANDIDATE, Outcome.FORGOTTEN, Outcome.NO_LIMITS, Outcome.UNKNOWN)
_PAIR_COLUMNS: Final = ("operator_id", "lady_db_id", "man_ulid", "activity", "outcome", "detail")


def _observation(checked: Checked, operator_id: str) -> AssetObservation:
    results = [result for result in checked.results if result.chat.operator_id == operator_id]
    return AssetObservation(
        asset_key=CHECKS_ASSET,
        partition=operator_id,
        metadata={
            **{f"pairs_{outcome.name.lower()}": count for outcome, count in checked.counts(operator_id).items()},
            "failed": checked.failures.get(operator_id, "no"),
            "pairs": _pairs(results),
        },
    )


def _outcomes(checked: Checked) -> dict[str, int]:
    return {f"pairs_{outcome.name.lower()}": count for outcome, count in sorted(checked.counts().items())}


def _pairs(results: Iterable[PairResult]) -> TableMetadataValue:
    rows = (
        (r.chat.operator_id, r.chat.pair.lady_db_id, r.chat.pair.man_ulid, r.chat.moment, r.outcome, r.detail)
        for r in results
    )
    return table(_PAIR_COLUMNS, rows)
