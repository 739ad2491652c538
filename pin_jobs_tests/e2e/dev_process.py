"""`pin-jobs dev` as a person starts it: a process and its screen."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg

from pin_jobs.sandbox.processes import processes_in
from pin_jobs.sandbox.web import free_port
from pin_jobs_tests.waiting import wait_for

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

    def environment(self) -> dict[str, str]:
        """That of the code server, which has the addresses of everything."""
        assert self.process is not None
        [code_server] = [
            child for child in psutil.Process(self.process.pid).children() if "code-server" in " ".join(child.cmdline())
        ]
        return code_server.environ()

    def asks_about_a_dialog(self) -> int:
        """As a run would, with what the code server has in its environment; the status."""
        environment = self.environment()
        one = "SELECT max(lady_db_id) FROM chathouse.dialogs"
        man = f"SELECT man_ulid FROM chathouse.dialogs WHERE lady_db_id = ({one}) LIMIT 1"
        lady = self.query(one, "chathouse")
        [[man_ulid]] = self.rows(man, "chathouse")
        response = httpx.get(
            f"{environment['DIALOG_API_URL']}/dialogs/lady-{lady}/{man_ulid}/messages",
            headers={"Authorization": f"Bearer {environment['DIALOG_API_TOKEN']}"},
            trust_env=False,
        )
        return response.status_code

    def url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self.data / 'postgres' / 'data'}"

    def rows(self, sql: str, database: str = "messenger") -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url(database)) as connection:
            return connection.execute(sql.encode()).fetchall()

    def query(self, sql: str, database: str = "messenger") -> int:
        [[value]] = self.rows(sql, database)
        return int(value)
