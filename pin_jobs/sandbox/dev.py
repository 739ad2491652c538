"""The supervisor behind `pin-jobs dev`: starts everything on this machine, watches it, and leaves nothing behind."""

import contextlib
import os
import secrets
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click

from pin_jobs.errors import PinJobsError
from pin_jobs.migrations import migrate_chathouse, migrate_messenger
from pin_jobs.sandbox.errors import SandboxError
from pin_jobs.sandbox.folder import DataFolder, held_data_folder
from pin_jobs.sandbox.host_tables import create_chathouse_tables, create_messenger_tables
from pin_jobs.sandbox.places import plain_path
from pin_jobs.sandbox.processes import MARK, Child, end_marked_processes, stop_children
from pin_jobs.sandbox.servers import EmbeddedPostgres, EmbeddedValkey
from pin_jobs.sandbox.web import WebState, free_port, web_state
from pin_jobs.settings import (
    CHATHOUSE_DATABASE_URL,
    DIALOG_API_ADAPTER,
    DIALOG_API_TOKEN,
    DIALOG_API_URL,
    MESSENGER_DATABASE_URL,
    REDIS_URL,
    Settings,
)

Say = Callable[[str], None]

_READY_SECONDS: Final = 90.0
_DIALOG_API_PORT: Final = 3100
_AWAY_SECONDS: Final = 30.0
_SCREEN: Final = """
  {url}

  Runs of the reaper   {url}/locations/pin_jobs/jobs/call_timeout_reaper/runs
  What starts them     {url}/locations/pin_jobs/sensors/call_timeout_reaper_sensor
  Runs for mail tasks  {url}/locations/pin_jobs/jobs/post_chat_mail/runs
  The calls, in SQL    {psql} '{database}' -c "SELECT status, count(*) FROM messenger.call_sessions GROUP BY 1"
  The dialog API       {dialog_api}/sandbox/faults (POST a fault's name below it, DELETE ends it)
  Data and logs        {data} (remove it to begin anew), {logs}

  Ctrl-C stops everything."""


def echo(line: str) -> None:
    """Print a line; when nobody reads any more (a closed pipe), go on in silence."""
    try:
        click.echo(line)
    except (OSError, ValueError):
        # The interpreter flushes once more at its exit, and would complain.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_dev(data_dir: Path, port: int, say: Say = echo) -> int:
    """Run the whole system until SIGINT, SIGTERM or SIGHUP; return the exit code.

    0 after such a signal; 1 when it cannot start or when one of its processes ends by itself, which `say` is told in
    one line. PostgreSQL and Valkey may end: they are started again. Listens on `port` of 127.0.0.1, or on the next
    free one.
    """
    with _stop_signals() as stop:
        try:
            with held_data_folder(data_dir) as folder:
                return _Sandbox(folder, stop, say).run(port)
        except PinJobsError as error:
            say(f"Error: {error}")
            return 1


class _Stop:
    """Counts the requests to stop. A plain number: an Event may deadlock when a signal handler sets it."""

    def __init__(self) -> None:
        self._requests = 0

    def request(self, _number: int, _frame: Any) -> None:
        self._requests += 1

    def requested(self) -> bool:
        return self._requests > 0

    def hurried(self) -> bool:
        return self._requests > 1


class _Stopped(Exception):
    """A request to stop arrived during the start."""


class _Sandbox:
    def __init__(self, folder: DataFolder, stop: _Stop, say: Say) -> None:
        self._folder = folder
        self._stop = stop
        self._say = say
        self._postgres = EmbeddedPostgres(folder.path / "postgres", say)
        self._valkey = EmbeddedValkey(folder.path / "valkey")
        self._code_socket = plain_path(folder.path) / "code_server.sock"
        self._dialog_api_port = 0
        self._begun = time.time()
        self._environment: dict[str, str] = {}
        self._gone_since: dict[str, float] = {}
        # In the order in which they are stopped.
        self._stages: list[list[Child]] = []

    def run(self, port: int) -> int:
        code = 1
        try:
            self._start(port)
            code = self._watch()
        except _Stopped:
            code = 0
        except PinJobsError as error:
            # A terminal's Ctrl-C reaches initdb too, whatever we do; its failure is then no error of ours.
            if self._stop.requested():
                code = 0
            else:
                self._say(f"Error: {error}")
        except Exception as error:  # noqa: BLE001  # a person gets one line, and the rest in a file
            log = self._folder.logs / "dev.log"
            log.write_text(traceback.format_exc())
            reason = next(iter(str(error).splitlines()), "")
            self._say(f"Error: {type(error).__name__}: {reason} (details in {log})")
        finally:
            self._stop_all()
        return code

    def _start(self, wanted_port: int) -> None:
        with self._step("Cleaning up after the last start"):
            for command in end_marked_processes(self._folder.path, grace=3):
                self._say(f"  ended a process that was left over: {command}")
        with self._step("PostgreSQL"):
            self._postgres.start()
            for database in ("messenger", "chathouse", "dagster"):
                self._postgres.create_database(database)
        with self._step("Valkey"):
            self._valkey.start()
        self._dialog_api_port = free_port(_DIALOG_API_PORT)
        self._environment = self._environment_of_children()
        Settings.from_environment(self._environment)
        port = self._choose_port(wanted_port)
        with self._step("Tables"):
            create_messenger_tables(self._postgres.url("messenger"))
            create_chathouse_tables(self._postgres.url("chathouse"))
            migrate_messenger(self._postgres.url("messenger"))
            migrate_chathouse(self._postgres.url("chathouse"))
        with self._step("Dagster's web server and code server"):
            self._start_web(port)
            self._wait_for_web(port, lambda state: state.loaded, "The code location is not loaded")
        with self._step("Dagster's daemon, calls and chats"):
            self._start_work()
            self._wait_for_web(port, lambda state: not state.missing_daemons, "Dagster's daemon does not run")
        self._show_screen(port)

    def _start_web(self, port: int) -> None:
        self._code_socket.unlink(missing_ok=True)
        self._folder.write_dagster_files(self._code_socket)
        # One code server for both: cheaper than one each, and the daemon never replaces it. A code-server rather
        # than a bare gRPC server, so that Reload in the web UI loads edited code. A socket rather than a port: two
        # servers on one port start without a word, and other users of the machine stay out.
        code_server = self._child(
            "code server",
            *("dagster", "code-server", "start", "-m", "pin_jobs.definitions", "--location-name", "pin_jobs"),
            *("--socket", str(self._code_socket)),
        )
        dialog_api = self._child("dialog API", "pin_jobs.sandbox.dialog_api", "--port", str(self._dialog_api_port))
        self._stages.append([code_server, dialog_api])
        web = self._child(
            "web server",
            *("dagster_webserver", "--host", "127.0.0.1", "--port", str(port), "-w", str(self._folder.workspace)),
        )
        self._stages.insert(0, [web])

    def _start_work(self) -> None:
        daemon = self._child("daemon", "dagster._daemon", "run", "-w", str(self._folder.workspace))
        self._stages[0].append(daemon)
        traffic = self._child("traffic", "pin_jobs.sandbox.traffic")
        self._stages.insert(0, [traffic, self._child("chats", "pin_jobs.sandbox.chats")])

    def _child(self, name: str, *module: str) -> Child:
        self._check_stop()
        return Child.start(name, (sys.executable, "-m", *module), self._environment, self._folder.path)

    def _environment_of_children(self) -> dict[str, str]:
        environment = {
            **os.environ,
            MARK: str(self._folder.path),
            MESSENGER_DATABASE_URL: self._postgres.url("messenger"),
            CHATHOUSE_DATABASE_URL: self._postgres.url("chathouse"),
            REDIS_URL: self._valkey.url,
            DIALOG_API_URL: f"http://127.0.0.1:{self._dialog_api_port}",
            DIALOG_API_TOKEN: secrets.token_urlsafe(),
            DIALOG_API_ADAPTER: "",
            "DAGSTER_HOME": str(self._folder.dagster_home),
            "DAGSTER_DATABASE_URL": self._postgres.url("dagster", driver="psycopg2"),
            # Else a code server waits a minute for calls that nobody will finish.
            "DAGSTER_GRPC_SHUTDOWN_GRACE_PERIOD": "1",
            # So that the last line of a log is the last thing that was said.
            "PYTHONUNBUFFERED": "1",
        }
        # Every run is a fresh interpreter, and would compile all of Dagster each time.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return environment

    def _choose_port(self, wanted: int) -> int:
        port = free_port(wanted)
        if port != wanted:
            self._say(f"Port {wanted} is taken; using {port}")
        self._folder.announce(f"http://127.0.0.1:{port}")
        return port

    def _wait_for_web(self, port: int, condition: Callable[[WebState], bool], complaint: str) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            self._check_stop()
            if obituary := self._first_obituary():
                raise SandboxError(obituary)
            state = web_state(port, self._begun)
            if state is not None and state.load_error:
                raise SandboxError(f"The code location is not loaded: {state.load_error} ({self._folder.logs})")
            if state is not None and condition(state):
                return
            if time.monotonic() > deadline:
                raise SandboxError(f"{complaint} after {_READY_SECONDS:.0f} s; the logs are in {self._folder.logs}")
            time.sleep(0.1)

    def _watch(self) -> int:
        looked = time.monotonic()
        while not self._stop.requested():
            if obituary := self._first_obituary():
                raise SandboxError(obituary)
            if time.monotonic() - looked > 5:
                self._check_servers()
                looked = time.monotonic()
            time.sleep(0.2)
        return 0

    def _check_servers(self) -> None:
        """Start a server again some time after it ended: somebody may want to see how the jobs take that."""
        for name, server in (("PostgreSQL", self._postgres), ("Valkey", self._valkey)):
            if server.is_running():
                self._gone_since.pop(name, None)
                continue
            now = time.monotonic()
            if name not in self._gone_since:
                self._gone_since[name] = now
                self._say(f"{name} has ended; it is started again in {_AWAY_SECONDS:.0f} s, unless somebody does")
            elif now - self._gone_since[name] > _AWAY_SECONDS:
                self._gone_since[name] = now
                self._start_again(name, server)

    def _start_again(self, name: str, server: EmbeddedPostgres | EmbeddedValkey) -> None:
        try:
            server.start()
        except SandboxError as error:
            self._say(f"{error}; the next try is in {_AWAY_SECONDS:.0f} s")
        else:
            self._say(f"{name} runs again")

    def _first_obituary(self) -> str | None:
        children = [child for stage in self._stages for child in stage]
        return next((line for child in children if (line := child.obituary)), None)

    def _stop_all(self) -> None:
        begun = time.monotonic()
        self._say("Stopping ...")
        for stage in self._stages:
            stop_children(stage, seconds=2, hurried=self._stop.hurried)
        # Runs go last: they are children of the code server, which waits for nobody.
        end_marked_processes(self._folder.path, grace=0.2 if self._stop.hurried() else 1.5)
        for name, server in (("Valkey", self._valkey), ("PostgreSQL", self._postgres)):
            try:
                server.stop()
            except Exception as error:  # noqa: BLE001  # the other one is to be stopped all the same
                self._say(f"{name} could not be stopped: {error}")
        self._code_socket.unlink(missing_ok=True)
        self._say(f"Stopped after {time.monotonic() - begun:.1f} s; the data stays in {self._folder.path}")

    def _check_stop(self) -> None:
        if self._stop.requested():
            raise _Stopped

    @contextlib.contextmanager
    def _step(self, what: str) -> Iterator[None]:
        self._check_stop()
        self._say(f"{what} ...")
        begun = time.monotonic()
        yield
        if (seconds := time.monotonic() - begun) > 2:
            self._say(f"  ready after {seconds:.1f} s")

    def _show_screen(self, port: int) -> None:
        self._say(
            _SCREEN.format(
                url=f"http://127.0.0.1:{port}",
                psql=shutil.which("psql") or self._postgres.psql,
                database=self._postgres.url("messenger", driver=""),
                dialog_api=self._environment[DIALOG_API_URL],
                data=self._folder.path,
                logs=self._folder.logs,
            )
        )


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
    # With a handler of our own, even where SIGINT was ignored (a shell's background job): children would inherit the
    # ignoring, and Dagster's code server, which does on SIGTERM what it does on SIGINT, could not be stopped.
    stop = _Stop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop.request) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
