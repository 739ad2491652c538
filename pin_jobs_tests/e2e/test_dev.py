"""`pin-jobs dev` as a person starts it: what comes of it, its screen, its signals."""

import os
import signal
import subprocess
import time

import psutil
import pytest

from pin_jobs.sandbox.web import web_state
from pin_jobs_tests.e2e.dev_process import START_SECONDS, Dev
from pin_jobs_tests.waiting import wait_for

pytestmark = pytest.mark.slow


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
