"""`pin-jobs dev` as a person starts it: a process, its screen, its signals."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest

from pin_jobs.sandbox.processes import processes_in
from pin_jobs.sandbox.web import free_port, web_state
from pin_jobs_tests.waiting import wait_for

pytestmark = pytest.mark.slow

READY = "Ctrl-C stops everything"
# With a code server and a web server importing on two busy cores.
START_SECONDS = 90


class Dev:
    """A `pin-jobs dev` on a folder and a port of its own."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.port = free_port(3300)
        self.screen = data.parent / "screen.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        program = Path(sys.executable).with_name("pin-jobs")
        return [str(program), "dev", "--data-dir", str(self.data), "--port", str(self.port)]

    def start(self, **environment: str) -> "Dev":
        with self.screen.open("wb") as output:
            self.process = subprocess.Popen(
                self.command(),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        return self

    def until_ready(self) -> "Dev":
        wait_for(lambda: READY in self.said() or self.has_ended(), START_SECONDS, "the screen")
        assert READY in self.said(), self.said()
        return self

    def said(self) -> str:
        return self.screen.read_text()

    def has_ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def exit_code(self, timeout: float = 40) -> int:
        assert self.process is not None
        return self.process.wait(timeout)

    def left_behind(self) -> list[str]:
        return [" ".join(process.cmdline()) for process in self._left_processes()]

    def _left_processes(self) -> list[psutil.Process]:
        found = [*processes_in(self.data / "postgres" / "data", "postgres")]
        found += processes_in(self.data / "valkey", "valkey-server")
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("PIN_JOBS_DEV") == str(self.data.resolve()):
                    found.append(process)
        return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def clean_up(self) -> None:
        if self.process is not None and not self.has_ended():
            self.signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
            self.process.kill()
        for process in self._left_processes():
            with suppress(psutil.Error):
                process.kill()

    def asks_about_a_dialog(self) -> int:
        """As a run would, with what the code server has in its environment; the status."""
        assert self.process is not None
        [code_server] = [
            child for child in psutil.Process(self.process.pid).children() if "code-server" in " ".join(child.cmdline())
        ]
        environment = code_server.environ()
        one = "SELECT max(lady_db_id) FROM chathouse.dialogs"
        man = f"SELECT man_ulid FROM chathouse.dialogs WHERE lady_db_id = ({one}) LIMIT 1"
        lady = self.query(one, "chathouse")
        with psycopg.connect(self.url("chathouse")) as connection:
            [man_ulid] = connection.execute(man.encode()).fetchone() or [""]
        response = httpx.get(
            f"{environment['DIALOG_API_URL']}/dialogs/lady-{lady}/{man_ulid}/messages",
            headers={"Authorization": f"Bearer {environment['DIALOG_API_TOKEN']}"},
            trust_env=False,
        )
        return response.status_code

    def url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self.data / 'postgres' / 'data'}"

    def query(self, sql: str, database: str = "messenger") -> int:
        with psycopg.connect(self.url(database)) as connection:
            row = connection.execute(sql.encode()).fetchone()
            assert row is not None
            return int(row[0])


@pytest.fixture
def dev() -> Iterator[Dev]:
    with tempfile.TemporaryDirectory(prefix="pj_", ignore_cleanup_errors=True) as folder:
        dev = Dev(Path(folder) / "data")
        yield dev
        dev.clean_up()


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
