import pytest
from dagster import EnvVar, in_process_executor, mem_io_manager

from pin_jobs.messenger.jobs import build_call_timeout_reaper
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.resources.postgres import PostgresResource


@pytest.fixture(scope="module")
def job():
    database = PostgresResource(url=EnvVar("MESSENGER_DATABASE_URL"), variable="MESSENGER_DATABASE_URL")
    return build_call_timeout_reaper(CallTimeoutReaperOptions(), database)


def test_the_job_is_three_ops_in_a_row(job):
    assert job.name == "call_timeout_reaper"
    dependencies = {
        node.name: {dep.node for inputs in job.dependencies[node].values() for dep in inputs.get_node_dependencies()}
        for node in job.dependencies
    }
    assert dependencies == {"claim": set(), "transition": {"claim"}, "write_outbox": {"transition"}}


def test_the_ops_share_one_process_and_its_memory(job):
    assert job.executor_def is in_process_executor
    assert job.resource_defs["io_manager"] is mem_io_manager


def test_nothing_is_retried_from_the_middle(job):
    assert job.tags["dagster/max_retries"] == "0"
    for node in job.graph.nodes:
        assert node.definition.retry_policy is None
        assert job.get_retry_policy_for_handle(_handle(node)) is None


def test_the_job_goes_ahead_of_others_in_the_queue(job):
    assert int(job.tags["dagster/priority"]) > 0


def test_the_job_can_be_launched_without_any_configuration(job):
    fields = job.config_mapping.config_schema.config_type.fields
    assert fields.keys() == {"dry_run", "batch_size"}
    assert not any(field.is_required for field in fields.values())


def test_the_job_shows_the_options_that_it_works_by(job):
    shown = {name: value.value for name, value in job.metadata.items()}
    assert shown["ring_timeout"] == "45s"
    assert shown["batch_size"] == "200"
    assert shown.keys() == CallTimeoutReaperOptions().in_words().keys()


def _handle(node):
    from dagster._core.definitions.dependency import NodeHandle  # noqa: PLC0415  # Dagster's private corner

    return NodeHandle(node.name, None)
