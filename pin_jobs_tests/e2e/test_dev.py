"""`pin-jobs dev` as a person starts it: what comes of it, its screen, its signals."""

import json
import os
import signal
import subprocess
import time

import httpx
import psutil
import pytest
from redis import Redis

from pin_jobs.sandbox.processes import processes_in
from pin_jobs.sandbox.web import web_state
from pin_jobs_tests.deployment import Dagster
from pin_jobs_tests.e2e.dev_process import START_SECONDS, Dev
from pin_jobs_tests.waiting import wait_for

# All in this file, so that no two of them look for a free port at the same moment.
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


def test_calls_are_reaped_tasks_are_created_and_sigterm_leaves_no_process(dev: Dev) -> None:
    begun = time.time()
    dev.start().until_ready()
    state = web_state(dev.port, begun)
    assert state is not None
    assert state.loaded
    missed = "SELECT count(*) FROM messenger.call_sessions c JOIN messenger.realtime_outbox o "
    missed += "ON o.payload ->> 'callId' = c.id::text WHERE c.status = "
    wait_for(lambda: dev.query(missed + "'Missed'") >= 10, 60, "missed calls with their outbox rows")
    wait_for(lambda: dev.query(missed + "'Failed'") >= 3, 60, "failed calls with their outbox rows")
    chats = "SELECT count(*) FROM chathouse.chat_activity WHERE happened_at < now() - interval '10 minutes'"
    wait_for(lambda: dev.query(chats, "chathouse") >= 10, 20, "chats that wait for a mail")
    wait_for(lambda: dev.asks_about_a_dialog() == 200, 20, "the dialog API to answer")
    tasks = "SELECT count(*) FROM chathouse.operator_tasks WHERE module = 'postChatMail'"
    wait_for(lambda: dev.query(tasks, "chathouse") >= 3, 120, "tasks to write a mail")
    dev.signal(signal.SIGTERM)
    assert dev.exit_code() == 0
    assert dev.left_behind() == []
    assert "Traceback" not in dev.said()


def test_what_a_kill_9_left_is_ended_by_the_next_start(dev: Dev) -> None:
    dev.start().until_ready()
    calls = dev.query("SELECT count(*) FROM messenger.call_sessions")
    dev.signal(signal.SIGKILL)
    dev.exit_code()
    assert dev.left_behind()
    dev.start().until_ready()
    assert "left over" in dev.said()
    assert dev.query("SELECT count(*) FROM messenger.call_sessions") >= calls
    dev.signal(signal.SIGINT)
    assert dev.exit_code() == 0
    assert dev.left_behind() == []


@pytest.mark.parametrize("moment", ["PostgreSQL ...", "Tables ...", "code server ...", "daemon"])
def test_a_stop_during_the_start_is_clean(dev: Dev, moment: str) -> None:
    dev.start()
    wait_for(lambda: moment in dev.said(), START_SECONDS, moment)
    dev.signal(signal.SIGINT)
    assert dev.exit_code() == 0, dev.said()
    assert dev.left_behind() == []
    assert "Traceback" not in dev.said()


def test_a_second_ctrl_c_hurries(dev: Dev) -> None:
    dev.start().until_ready()
    dev.signal(signal.SIGINT)
    wait_for(lambda: "Stopping" in dev.said(), 5, "the stop to begin")
    dev.signal(signal.SIGINT)
    assert dev.exit_code() == 0
    assert dev.left_behind() == []


@pytest.mark.parametrize(("name", "command"), [("code server", "code-server"), ("daemon", "dagster._daemon")])
def test_a_child_that_dies_is_named_and_everything_stops(dev: Dev, name: str, command: str) -> None:
    dev.start().until_ready()
    [child] = [
        process
        for process in psutil.Process(dev.process.pid if dev.process else 0).children()
        if command in " ".join(process.cmdline())
    ]
    child.kill()
    assert dev.exit_code(15) == 1
    [line] = [line for line in dev.said().splitlines() if line.startswith("Error")]
    assert f"The {name} was killed by signal 9" in line
    assert f"{name.replace(' ', '_')}.log" in line
    assert dev.left_behind() == []


def test_a_bad_option_is_one_line_before_dagster_starts(dev: Dev) -> None:
    dev.start(CALL_TIMEOUT_REAPER_BATCH_SIZE="0")
    assert dev.exit_code(60) == 1
    [line] = [line for line in dev.said().splitlines() if line.startswith("Error")]
    assert "CALL_TIMEOUT_REAPER_BATCH_SIZE" in line
    assert dev.left_behind() == []


def test_a_reader_that_goes_away_does_not_stop_it(dev: Dev) -> None:
    reading, writing = os.pipe()
    with (dev.data.parent / "errors.txt").open("wb") as errors:
        dev.process = subprocess.Popen(dev.command(), stdout=writing, stderr=errors, start_new_session=True)
    os.close(writing)
    os.read(reading, 10)
    os.close(reading)
    wait_for(lambda: web_state(dev.port, 0), START_SECONDS, "the web server")
    dev.signal(signal.SIGTERM)
    assert dev.exit_code() == 0
    assert (dev.data.parent / "errors.txt").read_text() == ""


def test_a_path_with_a_space_works(dev: Dev) -> None:
    dev.data = dev.data.parent / "my data"
    dev.start().until_ready()
    dev.signal(signal.SIGTERM)
    assert dev.exit_code() == 0
    assert dev.left_behind() == []


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
