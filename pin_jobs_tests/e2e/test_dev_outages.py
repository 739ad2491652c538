"""`pin-jobs dev` while Redis is gone and the dialog API fails: nothing ends, no task is lost or comes twice."""

import json
import signal
import time

import httpx
import pytest
from redis import Redis

from pin_jobs.sandbox.processes import processes_in
from pin_jobs_tests.deployment import Dagster
from pin_jobs_tests.e2e.dev_process import Dev
from pin_jobs_tests.waiting import wait_for

pytestmark = pytest.mark.slow

JOB = "post_chat_mail"
TASKS = "SELECT count(*) FROM chathouse.operator_tasks WHERE module = 'postChatMail'"
TWICE = (
    "SELECT count(*) FROM (SELECT FROM chathouse.operator_tasks WHERE module = 'postChatMail' "
    "GROUP BY lady_db_id, man_ulid, event_trigger HAVING count(*) > 1) AS twice"
)
ACTIVE = (
    "SELECT operator_id, id::text FROM chathouse.operator_tasks WHERE module = 'postChatMail' AND status = 'active'"
)


def test_redis_and_the_dialog_api_may_fail_for_a_while(dev: Dev) -> None:
    dev.start(POST_CHAT_MAIL_CHECK_INTERVAL="5").until_ready()
    dagster = Dagster(f"http://127.0.0.1:{dev.port}")
    faults = f"{dev.environment()['DIALOG_API_URL']}/sandbox/faults"
    httpx.post(f"{faults}/500", trust_env=False).raise_for_status()
    end_valkey(dev)
    outage = time.time()

    def checks() -> list[str]:
        end_valkey(dev)
        runs = dagster.runs("SUCCESS", job=JOB)
        return [run["runId"] for run in runs if run["startTime"] > outage]

    wait_for(checks, 90, "a check without Redis and without answers")
    tasks = dev.query(TASKS, "chathouse")
    wait_for(lambda: len(checks()) >= 3, 90, "two more of them")
    assert dev.query(TASKS, "chathouse") == tasks
    said = "\n".join(message for run in checks() for message in dagster.messages(run))
    assert "the dialog API left" in said
    assert "Redis cannot be reached" in said

    httpx.delete(faults, trust_env=False).raise_for_status()
    wait_for(lambda: dev.query(TASKS, "chathouse") > tasks, 90, "a task after the dialog API answers again")
    wait_for(lambda: dev.said().endswith("Valkey runs again\n"), 90, "Valkey to be started again")
    redis = Redis.from_url(dev.environment()["REDIS_URL"], decode_responses=True)
    wait_for(lambda: shown(redis) == set(dev.rows(ACTIVE, "chathouse")) != set(), 60, "the stores to be filled again")
    assert dagster.runs("FAILURE", job=JOB) == []
    assert dev.query(TWICE, "chathouse") == 0
    dev.signal(signal.SIGTERM)
    assert dev.exit_code() == 0
    assert "Traceback" not in dev.said()


def end_valkey(dev: Dev) -> None:
    for process in processes_in(dev.data / "valkey", "valkey-server"):
        process.kill()


def shown(redis: "Redis[str]") -> set[tuple[str, str]]:
    """The operators and the ids of the tasks in their stores."""
    stores = [json.loads(task) for key in redis.keys("chathouse:operator:*:tasks") for task in redis.hvals(key)]
    return {(task["operatorId"], task["id"]) for task in stores if task["module"] == "postChatMail"}
