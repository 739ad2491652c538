from datetime import timedelta

import pytest
from dagster import DagsterInvalidConfigError, EnvVar, in_process_executor

from pin_jobs.messenger.jobs import (
    InvalidRunConfig,
    build_call_timeout_reaper,
    build_call_timeout_reaper_backfill,
)
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.resources.postgres import PostgresResource
from pin_jobs.resources.run_memory import run_memory

DATABASE = PostgresResource(url=EnvVar("MESSENGER_DATABASE_URL"), variable="MESSENGER_DATABASE_URL")


@pytest.fixture(scope="module")
def job():
    return build_call_timeout_reaper(CallTimeoutReaperOptions(), DATABASE)


def test_the_job_is_three_ops_in_a_row(job):
    assert job.name == "call_timeout_reaper"
    dependencies = {
        node.name: {dep.node for inputs in job.dependencies[node].values() for dep in inputs.get_node_dependencies()}
        for node in job.dependencies
    }
    assert dependencies == {"claim": set(), "transition": {"claim"}, "write_outbox": {"transition"}}


def test_the_ops_share_one_process_and_its_memory(job):
    assert job.executor_def is in_process_executor
    assert job.resource_defs["io_manager"] is run_memory


def test_nothing_is_retried_from_the_middle(job):
    assert job.tags["dagster/max_retries"] == "0"
    for node in job.graph.nodes:
        assert node.definition.retry_policy is None
        assert job.get_retry_policy_for_handle(_handle(node)) is None


def test_the_job_goes_ahead_of_others_in_the_queue(job):
    assert int(job.tags["dagster/priority"]) > 0


def test_dagster_gives_a_run_more_time_than_the_server_gives_its_transaction():
    options = CallTimeoutReaperOptions(lock_ttl=timedelta(minutes=5), max_run_duration=timedelta(minutes=4))
    live = build_call_timeout_reaper(options, DATABASE)
    backfill = build_call_timeout_reaper_backfill(options, DATABASE)
    assert int(live.tags["dagster/max_runtime"]) > 5 * 60
    assert int(backfill.tags["dagster/max_runtime"]) > 4 * 5 * 60


class TestTheLaunchpad:
    def test_of_the_live_job_takes_two_values_and_needs_none(self, job):
        fields = job.config_mapping.config_schema.config_type.fields
        assert fields.keys() == {"dry_run", "batch_size"}
        assert not any(field.is_required for field in fields.values())
        assert "1 to 10000" in fields["batch_size"].description
        assert "roll it back" in fields["dry_run"].description

    def test_of_the_backfill_offers_a_dry_run_and_no_size_that_would_mean_nothing(self):
        job = build_call_timeout_reaper_backfill(CallTimeoutReaperOptions(), DATABASE)
        assert job.resource_defs["reap_batch"].config_schema.config_type.fields.keys() == {"dry_run"}

    @pytest.mark.parametrize("batch_size", [0, -1, 10_001])
    def test_refuses_a_size_out_of_range_by_the_name_and_the_range(self, job, batch_size):
        with pytest.raises(InvalidRunConfig) as refused:
            job.execute_in_process(run_config={"batch_size": batch_size})
        assert str(refused.value) == f"batch_size is {batch_size}; allowed is 1 to 10000"

    @pytest.mark.parametrize(
        "config", [{"batch_size": "x"}, {"batch_size": 2.5}, {"batch_size": True}, {"dry_run": "yes"}, {"size": 1}]
    )
    def test_refuses_what_it_does_not_know(self, job, config):
        with pytest.raises(DagsterInvalidConfigError, match=next(iter(config))):
            job.execute_in_process(run_config=config)


def test_the_job_shows_the_options_that_it_works_by(job):
    shown = {name: value.value for name, value in job.metadata.items()}
    assert shown["ring_timeout"] == "45s"
    assert shown["batch_size"] == "200"
    assert shown.keys() == CallTimeoutReaperOptions().in_words().keys()


def _handle(node):
    from dagster._core.definitions.dependency import NodeHandle  # noqa: PLC0415  # Dagster's private corner

    return NodeHandle(node.name, None)
