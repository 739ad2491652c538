"""The graph of a check, and its two jobs: the one that the sensor launches and the backfill by operator."""

from collections.abc import Mapping
from typing import Any, Final

from dagster import (
    AssetSpec,
    ConfigMapping,
    ConfigurableResource,
    DynamicPartitionsDefinition,
    Field,
    JobDefinition,
    ResourceDefinition,
    graph,
    in_process_executor,
)

from pin_jobs.chathouse.ops import (
    CHECKS_ASSET,
    check_mail_limits,
    create_tasks,
    find_candidates,
    operator_checks_resource,
)
from pin_jobs.chathouse.options import PostChatMailOptions
from pin_jobs.resources.run_memory import run_memory

Resources = Mapping[str, ConfigurableResource[None]]
JOB_NAME: Final = "post_chat_mail"
BACKFILL_JOB_NAME: Final = "post_chat_mail_backfill"
# The sensor keeps its keys in step with the operators that have a runner.
OPERATORS: Final = DynamicPartitionsDefinition(name="operators")
PRIORITY: Final = "5"
BACKFILL_PRIORITY: Final = "-10"
BACKFILL_TAG: Final = "pin_jobs/backfill"
MAX_RUNTIME_SECONDS: Final = 600

OPERATOR_CHECKS: Final = AssetSpec(
    CHECKS_ASSET,
    partitions_def=OPERATORS,
    group_name=JOB_NAME,
    description="The checks of each operator: per partition, which pairs were looked at and what became of them. "
    "Checks that find nothing to act on leave no trace here.",
)


@graph(
    description="After a paid chat to which no mail was sent since, give the operator a task to write one. Finds the "
    "chats of all operators of the run, asks the dialog API about mail limits, and writes each operator's tasks."
)
def check_operators() -> None:
    """One check: find_candidates, check_mail_limits, create_tasks."""
    create_tasks(check_mail_limits(find_candidates()))


def build_post_chat_mail(options: PostChatMailOptions, resources: Resources) -> JobDefinition:
    """The check that the sensor launches for operators that are due; by hand, for all at work or for those named."""
    return _build(
        JOB_NAME,
        operator_checks_resource(options, is_backfill=False),
        options,
        resources,
        tags={"dagster/priority": PRIORITY},
        config=_BY_HAND,
    )


def build_post_chat_mail_backfill(options: PostChatMailOptions, resources: Resources) -> JobDefinition:
    """The same for one operator, due or not, at work or not; it waits while somebody else checks the operator."""
    return _build(
        BACKFILL_JOB_NAME,
        operator_checks_resource(options, is_backfill=True),
        options,
        resources,
        tags={"dagster/priority": BACKFILL_PRIORITY, BACKFILL_TAG: JOB_NAME},
        partitions_def=OPERATORS,
    )


def _build(  # noqa: PLR0913  # all but four by name
    name: str,
    checks: ResourceDefinition,
    options: PostChatMailOptions,
    resources: Resources,
    *,
    tags: dict[str, str],
    config: ConfigMapping | None = None,
    partitions_def: DynamicPartitionsDefinition | None = None,
) -> JobDefinition:
    """A job of the graph; no run retries, because the next check is the retry."""
    return check_operators.to_job(
        name=name,
        executor_def=in_process_executor,
        resource_defs={
            "io_manager": run_memory,
            "operator_checks": checks,
            **{name: _without_config(made) for name, made in resources.items()},
        },
        config=config,
        partitions_def=partitions_def,
        tags={"dagster/max_retries": "0", "dagster/max_runtime": str(MAX_RUNTIME_SECONDS), **tags},
        metadata=options.in_words(),
    )


def _without_config(made: ConfigurableResource[None]) -> ResourceDefinition:
    """The same resource as the environment has it, with nothing to say about it in a run's configuration.

    Else whoever may launch a run could send the token of the dialog API to a place of his own.
    """
    return ResourceDefinition(
        lambda _: made.process_config_and_initialize(), config_schema={}, description=type(made).__doc__
    )


def _run_config(config: dict[str, Any]) -> dict[str, Any]:
    return {"resources": {"operator_checks": {"config": config}}}


_BY_HAND: Final = ConfigMapping(
    config_fn=_run_config,
    config_schema={
        "operators": Field(
            [str], default_value=[], description="Ids of the operators to check; all that are at work when left out."
        ),
        "only_due": Field(
            bool,
            default_value=False,
            description="Leave out operators whose next check is not due; the sensor says so.",
        ),
    },
)
