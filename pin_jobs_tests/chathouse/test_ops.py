"""Runs of the two jobs and ticks of the sensor, in this process, seen as the UI shows them."""

import logging

import pytest
from dagster import (
    AssetKey,
    DagsterEventType,
    DagsterInstance,
    DagsterInvalidConfigError,
    EnvVar,
    TableMetadataValue,
    build_sensor_context,
)

from pin_jobs.chathouse.jobs import (
    BACKFILL_JOB_NAME,
    JOB_NAME,
    OPERATORS,
    build_post_chat_mail,
    build_post_chat_mail_backfill,
)
from pin_jobs.chathouse.options import PostChatMailOptions
from pin_jobs.chathouse.sensors import build_post_chat_mail_sensors
from pin_jobs.resources.dialog_api import DialogApiResource
from pin_jobs.resources.postgres import PostgresResource
from pin_jobs.resources.redis import RedisResource


@pytest.fixture
def resources(chathouse, valkey_url, valkey, monkeypatch):
    assert valkey.dbsize() == 0
    monkeypatch.setenv("CHATHOUSE_DATABASE_URL", chathouse.jobs_url)
    monkeypatch.setenv("REDIS_URL", valkey_url)
    return {
        "chathouse_database": PostgresResource(url=EnvVar("CHATHOUSE_DATABASE_URL")),
        "redis": RedisResource(url=EnvVar("REDIS_URL")),
        "dialog_api": DialogApiResource(adapter="pin_jobs_tests.resources.adapters:Crm"),
    }


@pytest.fixture
def instance():
    with DagsterInstance.ephemeral() as made:
        yield made


class Run:
    def __init__(self, result, instance):
        self.success = result.success
        self.run_id = result.run_id
        self.logs = [(entry.level, entry.user_message) for entry in instance.all_logs(result.run_id)]
        events = list(result.all_events)
        self.failures = [e.event_specific_data.user_failure_data for e in events if e.is_step_failure]
        self.observations = {
            e.event_specific_data.asset_observation.partition: e.event_specific_data.asset_observation.metadata
            for e in events
            if e.event_type_value == "ASSET_OBSERVATION"
        }
        self._outputs = {e.step_key: e.event_specific_data.metadata for e in events if e.is_successful_output}

    def values(self, op):
        return {k: v.value for k, v in self._outputs[op].items() if not isinstance(v, TableMetadataValue)}

    def table(self, op, name="pairs"):
        return [dict(record.data) for record in self._outputs[op][name].records]


@pytest.fixture
def execute(resources, instance):
    def run(config=None, **options):
        job = build_post_chat_mail(PostChatMailOptions(**options), resources)
        return Run(job.execute_in_process(config or {}, instance=instance, raise_on_error=False), instance)

    return run


class TestARun:
    def test_says_of_every_pair_what_became_of_it(self, chathouse, execute):
        operator = chathouse.add_operator("anna")
        lady = chathouse.add_lady(operator)
        created = chathouse.add_chat(operator, "2h", lady=lady)
        fresh = chathouse.add_chat(operator, "1min", lady=lady)
        answered = chathouse.add_chat(operator, "1h", lady=lady)
        chathouse.add_mail(answered)

        run = execute()

        assert run.success
        assert run.values("find_candidates") == {
            "operators": 1,
            "left_out": 0,
            "pairs_answered": 1,
            "pairs_candidate": 1,
            "pairs_fresh": 1,
        }
        assert run.values("create_tasks") == {
            "operators": 1,
            "pairs_answered": 1,
            "pairs_created": 1,
            "pairs_fresh": 1,
        }
        (task,) = chathouse.tasks()
        rows = {row["man_ulid"]: row for row in run.table("create_tasks")}
        assert rows[created.man_ulid]["outcome"] == "created"
        assert rows[created.man_ulid]["detail"] == str(task["id"])
        assert rows[created.man_ulid]["activity"] == task["event_trigger"]
        assert rows[fresh.man_ulid]["outcome"] == "fresh"
        assert rows[answered.man_ulid]["outcome"] == "answered"
        (row,) = run.table("check_mail_limits")
        assert row["man_ulid"] == created.man_ulid

    def test_leaves_the_history_of_each_operator_under_its_partition(self, chathouse, execute, instance):
        for name in ("anna", "berta"):
            chathouse.add_chat(chathouse.add_operator(name))
        run = execute()
        assert run.observations.keys() == {"anna", "berta"}
        assert run.observations["anna"]["pairs_created"].value == 1
        assert len(run.observations["anna"]["pairs"].records) == 1
        records = instance.fetch_observations(AssetKey("operator_checks"), limit=10).records
        assert {record.partition_key for record in records} == {"anna", "berta"}

    def test_takes_the_operators_that_it_is_given(self, chathouse, execute):
        for name in ("anna", "berta"):
            chathouse.add_chat(chathouse.add_operator(name))
        run = execute({"operators": ["berta", "nobody"]})
        assert run.values("find_candidates")["operators"] == 1
        assert run.table("find_candidates", "operators_left_out") == [
            {"operator_id": "nobody", "reason": "it has no runner"}
        ]
        assert [task["operator_id"] for task in chathouse.tasks()] == ["berta"]

    def test_in_which_one_operator_fails_fails_by_name_and_the_others_work_is_done(self, chathouse, execute):
        for name in ("anna", "berta", "carla"):
            chathouse.add_chat(chathouse.add_operator(name))
        chathouse.run("ALTER TABLE chathouse.operator_tasks ADD CONSTRAINT never CHECK (operator_id <> 'berta')")
        run = execute()
        assert not run.success
        (failure,) = run.failures
        assert failure.description.startswith("1 of the operators could not be checked: operator berta: ")
        assert "never" in failure.description
        assert sorted(task["operator_id"] for task in chathouse.tasks()) == ["anna", "carla"]
        assert failure.metadata["pairs_created"].value == 2

    def test_gives_the_operators_back_when_it_fails_in_the_middle(self, chathouse, execute):
        chathouse.add_chat(chathouse.add_operator("anna"))
        chathouse.run("ALTER TABLE chathouse.inmails RENAME TO something_else")
        assert not execute().success
        chathouse.run("ALTER TABLE chathouse.something_else RENAME TO inmails")
        assert execute().success
        assert len(chathouse.tasks()) == 1

    @pytest.mark.parametrize("config", [{"operators": "anna"}, {"operator": ["anna"]}, {"only_due": "perhaps"}])
    def test_is_refused_with_nonsense_in_the_launchpad(self, execute, config):
        with pytest.raises(Exception, match="Error in config mapping"):
            execute(config)

    def test_logs_no_password_and_nobodys_name(self, chathouse, execute):
        chathouse.add_chat(chathouse.add_operator("anna"))
        run = execute()
        text = "\n".join(message for _, message in run.logs)
        assert "s3cr3t" not in text
        assert not [message for level, message in run.logs if level >= logging.WARNING]


class TestTheBackfill:
    @pytest.fixture
    def backfill(self, resources, instance):
        def run(operator=None):
            job = build_post_chat_mail_backfill(PostChatMailOptions(), resources)
            tags = {} if operator is None else {"dagster/partition": operator}
            return Run(job.execute_in_process(instance=instance, raise_on_error=False, tags=tags), instance)

        return run

    def test_checks_the_operator_whether_or_not_it_is_due_or_at_work(self, chathouse, backfill, execute):
        chathouse.add_chat(chathouse.add_operator("anna"))
        dialog = chathouse.add_chat(chathouse.add_operator("berta", stopped="1h"))
        execute()
        assert chathouse.tasks(dialog) == []
        assert backfill("berta").success
        assert len(chathouse.tasks(dialog)) == 1
        assert backfill("anna").values("create_tasks") == {"operators": 1}

    def test_without_an_operator_fails_in_one_line(self, chathouse, backfill):
        chathouse.add_chat(chathouse.add_operator("anna"))
        run = backfill()
        assert not run.success
        assert chathouse.tasks() == []

    @pytest.mark.parametrize(
        ("resource", "config"),
        [("dialog_api", {"url": "http://127.0.0.1:9/elsewhere"}), ("operator_checks", {"operators": ["berta"]})],
    )
    def test_takes_no_address_and_no_other_operator(self, chathouse, resources, instance, resource, config):
        chathouse.add_chat(chathouse.add_operator("anna"))
        job = build_post_chat_mail_backfill(PostChatMailOptions(), resources)
        (unexpected,) = config
        words = f'unexpected config entry "{unexpected}" at path root:resources:{resource}'
        with pytest.raises(DagsterInvalidConfigError, match=words):
            job.execute_in_process(
                {"resources": {resource: {"config": config}}}, instance=instance, tags={"dagster/partition": "anna"}
            )
        assert instance.get_runs_count() == 0


@pytest.mark.parametrize("ops", [["find_candidates"], ["find_candidates", "check_mail_limits"]])
def test_some_of_the_ops_do_not_run_without_the_others(chathouse, resources, instance, ops):
    chathouse.add_chat(chathouse.add_operator("anna"))
    job = build_post_chat_mail(PostChatMailOptions(), resources)
    result = job.execute_in_process(instance=instance, raise_on_error=False, op_selection=ops)
    (failure,) = instance.all_logs(result.run_id, DagsterEventType.RUN_FAILURE)
    assert failure.dagster_event.job_failure_data.error.message.strip() == (
        "pin_jobs.chathouse.ops.NotAWholeCheck: the three ops of a check share its leases and work together only: "
        "launch, or re-execute, all of them"
    )
    assert chathouse.value("SELECT count(*) FROM pin_jobs.operator_checks WHERE lease_token IS NOT NULL") == 0


class TestTheSensor:
    @pytest.fixture
    def tick(self, resources, instance):
        def run(**options):
            chosen = PostChatMailOptions(**options)
            sensors = build_post_chat_mail_sensors(build_post_chat_mail(chosen, resources), chosen, running=True)
            context = build_sensor_context(
                instance=instance,
                resources={name: resources[name] for name in ("chathouse_database", "redis")},
            )
            return sensors[0](context)

        return run

    def test_asks_for_one_run_of_all_that_have_something_to_act_on(self, chathouse, tick):
        for number in range(3):
            chathouse.add_chat(chathouse.add_operator(f"operator-{number}"))
        chathouse.add_operator("idle")
        (request,) = tick().run_requests
        assert request.run_config == {"operators": [f"operator-{n}" for n in range(3)], "only_due": True}
        assert request.tags["pin_jobs/due"] == "3 operators"

    def test_spreads_them_over_several_runs_where_they_are_too_many(self, chathouse, tick):
        for number in range(5):
            chathouse.add_chat(chathouse.add_operator(f"operator-{number}"))
        assert [len(r.run_config["operators"]) for r in tick(operators_per_run=2).run_requests] == [2, 2, 1]

    def test_says_why_it_asks_for_no_run(self, chathouse, tick):
        assert tick().skip_reason.skip_message == "No operator is at work."
        chathouse.add_operator("anna")
        assert tick().skip_reason.skip_message == "1 operator checked: no chat to act on."
        assert tick().skip_reason.skip_message.startswith("No operator is due; the next check is due at ")
        chathouse.add_chat("anna")
        chathouse.run("UPDATE pin_jobs.operator_checks SET next_check = clock_timestamp()")
        assert tick().run_requests
        assert tick().skip_reason.skip_message.startswith("Every operator that is due is being checked")

    def test_keeps_the_partitions_of_the_backfill_in_step(self, chathouse, tick, instance):
        chathouse.add_operator("anna")
        instance.add_dynamic_partitions(OPERATORS.name, ["gone"])
        requests = tick().dynamic_partitions_requests
        assert [list(request.partition_keys) for request in requests] == [["anna"], ["gone"]]

    def test_has_as_many_as_there_are_shards(self, resources):
        options = PostChatMailOptions(sensor_shards=3)
        sensors = build_post_chat_mail_sensors(build_post_chat_mail(options, resources), options, running=True)
        assert [sensor.name for sensor in sensors] == [f"post_chat_mail_sensor_{shard}" for shard in range(3)]


def test_the_jobs_are_named_as_documented():
    assert (JOB_NAME, BACKFILL_JOB_NAME) == ("post_chat_mail", "post_chat_mail_backfill")
