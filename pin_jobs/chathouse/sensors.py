"""The sensors that find the operators who are due, and start a check of those that have something to act on."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from dagster import (
    AddDynamicPartitionsRequest,
    DefaultSensorStatus,
    DeleteDynamicPartitionsRequest,
    JobDefinition,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    get_dagster_logger,
    sensor,
)
from sqlalchemy import Engine

from pin_jobs.chathouse.dialogs import due_at, split
from pin_jobs.chathouse.jobs import OPERATORS
from pin_jobs.chathouse.look import Look, look_at_operators
from pin_jobs.chathouse.options import PostChatMailOptions
from pin_jobs.chathouse.transaction import READ_TIMEOUT, find_operators, transaction
from pin_jobs.moments import moment
from pin_jobs.resources.postgres import PostgresResource
from pin_jobs.resources.redis import RedisResource

PartitionsRequest = AddDynamicPartitionsRequest | DeleteDynamicPartitionsRequest
DUE_TAG: Final = "pin_jobs/due"
# The daemon looks at its sensors every five seconds; an interval one second short hits the grid.
_INTERVAL_SECONDS: Final = 4
# For a server that cannot keep to its own limits, because it is frozen.
_ANSWER_TIMEOUT: Final = timedelta(seconds=22)


def build_post_chat_mail_sensors(
    job: JobDefinition, options: PostChatMailOptions, *, running: bool
) -> list[SensorDefinition]:
    """One sensor, or as many as `sensor_shards` says, each for its share of the operators."""
    return [_build(job, options, shard, running=running) for shard in range(options.sensor_shards)]


def _build(job: JobDefinition, options: PostChatMailOptions, shard: int, *, running: bool) -> SensorDefinition:
    name = f"{job.name}_sensor" if options.sensor_shards == 1 else f"{job.name}_sensor_{shard}"

    @sensor(
        name=name,
        job=job,
        minimum_interval_seconds=_INTERVAL_SECONDS,
        default_status=DefaultSensorStatus.RUNNING if running else DefaultSensorStatus.STOPPED,
        description="Looks every 5 s which operators are due for a check. Those with a chat that no mail followed go "
        "into a run; the others are checked off on the spot.",
    )
    def post_chat_mail_sensor(
        context: SensorEvaluationContext, chathouse_database: PostgresResource, redis: RedisResource
    ) -> SensorResult:
        engine = chathouse_database.engine(name, answer_timeout=_ANSWER_TIMEOUT)
        with redis.store(get_dagster_logger(name)) as store:
            look = look_at_operators(engine, store, options, shard=shard)
        requests = run_requests(look, options)
        return SensorResult(
            run_requests=requests,
            skip_reason=None if requests else SkipReason(skip_reason(look, options)),
            dynamic_partitions_requests=_partition_requests(context, engine) if shard == 0 else [],
        )

    return post_chat_mail_sensor


def run_requests(look: Look, options: PostChatMailOptions) -> list[RunRequest]:
    """A run for the operators that have something to act on; a further one where they are more than one run takes."""
    return [
        RunRequest(
            run_config={"operators": list(operators), "only_due": True},
            tags={DUE_TAG: "1 operator" if len(operators) == 1 else f"{len(operators)} operators"},
        )
        for operators in split(look.requested, options.operators_per_run)
    ]


def skip_reason(look: Look, options: PostChatMailOptions) -> str:
    """Why a tick asked for no run."""
    if look.checked_off:
        count = len(look.checked_off)
        return f"{'1 operator' if count == 1 else f'{count} operators'} checked: no chat to act on."
    dues = [due for operator in look.operators if (due := due_at(operator, options.times, look.now))]
    if not dues:
        return "No operator is at work."
    upcoming = [due for due in dues if due > look.now]
    if not upcoming:
        return "Every operator that is due is being checked, or a check of it was asked for."
    return f"No operator is due; the next check is due at {moment(min(upcoming))}."


def _partition_requests(context: SensorEvaluationContext, engine: Engine) -> Sequence[PartitionsRequest]:
    """What brings the partitions of the backfill in step with the operators that have a runner."""
    with transaction(engine, READ_TIMEOUT) as connection:
        _, operators = find_operators(connection)
    wanted = {operator.operator_id for operator in operators}
    known = set(context.instance.get_dynamic_partitions(str(OPERATORS.name)))
    requests: list[PartitionsRequest] = []
    if new := sorted(wanted - known):
        requests.append(OPERATORS.build_add_request(new))
    if gone := sorted(known - wanted):
        requests.append(OPERATORS.build_delete_request(gone))
    return requests
