"""The post-chat mail under the daemon, with everything done to its sensor and its runs that the web UI offers."""

from typing import Any

import pytest
from redis import Redis

from pin_jobs.sandbox.dialog_api import DialogApiServer
from pin_jobs_tests.chathouse.factories_chathouse import Chathouse
from pin_jobs_tests.conftest import DIALOG_API_TOKEN
from pin_jobs_tests.deployment import LOCATION, SENSOR_ON, UNFINISHED, deployment
from pin_jobs_tests.waiting import wait_for

pytestmark = pytest.mark.slow

JOB = "post_chat_mail"
SENSOR = {**LOCATION, "sensorName": f"{JOB}_sensor"}
SET_CURSOR = """mutation ($sensor: SensorSelector!, $cursor: String) {
  setSensorCursor(sensorSelector: $sensor, cursor: $cursor) { __typename }
}"""
IDS = "query ($sensor: SensorSelector!) { sensorOrError(sensorSelector: $sensor) { ... on Sensor { id } } }"
OFF = "mutation ($id: String!) { stopSensor(id: $id) { __typename } }"
CHECKED = "SELECT last_completed FROM pin_jobs.operator_checks WHERE operator_id = 'anna'"


def test_a_reset_cursor_deleted_runs_and_a_switched_sensor_bring_no_task_twice_and_lose_none(
    request: pytest.FixtureRequest,
    server: Any,
    messenger_template: str,
    chathouse: Chathouse,
    valkey: Redis,
    valkey_url: str,
    dialog_api: DialogApiServer,
) -> None:
    assert valkey.ping()
    first = chathouse.add_chat(chathouse.add_operator("anna"))
    variables = {
        "CHATHOUSE_DATABASE_URL": chathouse.jobs_url,
        "REDIS_URL": valkey_url,
        "DIALOG_API_URL": dialog_api.url,
        "DIALOG_API_TOKEN": DIALOG_API_TOKEN,
        "POST_CHAT_MAIL_CHECK_INTERVAL": "5",
    }
    with deployment(request.config, server, messenger_template, **variables) as host:
        dagster = host.dagster
        wait_for(lambda: chathouse.tasks(first), 90, "a task for the first chat")
        wait_for(lambda: not dagster.runs(*UNFINISHED, job=JOB), 60, "its run to end")

        sensor_id = dagster.ask(IDS, sensor=SENSOR)["sensorOrError"]["id"]
        assert dagster.ask(OFF, id=sensor_id)["stopSensor"]["__typename"] == "StopSensorMutationResult"
        # What the operator has written is no longer in the way of another task.
        chathouse.run("UPDATE chathouse.operator_tasks SET status = 'closed', closed_at = now()")
        for run in dagster.runs(job=JOB):
            dagster.delete(run["runId"])
        assert dagster.ask(SET_CURSOR, sensor=SENSOR)["setSensorCursor"]["__typename"] == "Sensor"
        second = chathouse.add_chat("anna", lady=first.lady)
        assert dagster.ask(SENSOR_ON, sensor=SENSOR)["startSensor"]["__typename"] == "Sensor"

        wait_for(lambda: chathouse.tasks(second), 90, "a task for the chat that came meanwhile")
        for _ in range(2):
            before = chathouse.value(CHECKED)
            wait_for(lambda before=before: chathouse.value(CHECKED) != before, 60, "another check")
        assert len(chathouse.tasks(first)) == len(chathouse.tasks(second)) == 1
        assert dagster.runs("FAILURE", job=JOB) == []
