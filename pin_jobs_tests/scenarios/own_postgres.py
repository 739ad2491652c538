"""A PostgreSQL server of a test's own, to be stopped, frozen and killed."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import psycopg

from pin_jobs.sandbox.servers import EmbeddedPostgres
from pin_jobs_tests.conftest import Server, create_messenger_template, fast_folder
from pin_jobs_tests.waiting import wait_for


class OwnPostgres(EmbeddedPostgres):
    """An embedded server that can be frozen, and crash."""

    def freeze(self) -> None:
        """SIGSTOP to all its processes, the parent first: nobody answers, and the kernel takes connections for it."""
        for process in self._oldest_first():
            process.suspend()

    def thaw(self) -> None:
        for process in self._oldest_first():
            process.resume()

    def crash(self) -> None:
        """SIGKILL to the process of one session: the server ends all others too, and recovers."""
        with self._connect() as victim, self._connect() as another:
            psutil.Process(victim.info.backend_pid).kill()
            wait_for(lambda: not self._answers(another), 30, "the server to have ended the other sessions")
        wait_for(self._takes_connections, 30, "the server to have recovered")

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(self.url("postgres", driver=""), autocommit=True)

    def _answers(self, connection: psycopg.Connection) -> bool:
        with suppress(psycopg.OperationalError):
            return bool(connection.execute("SELECT 1"))
        return False

    def _takes_connections(self) -> bool:
        with suppress(psycopg.OperationalError), self._connect():
            return True
        return False

    def _oldest_first(self) -> list[psutil.Process]:
        return sorted(self._processes(), key=lambda process: process.create_time())


@contextmanager
def own_postgres() -> Iterator[tuple[OwnPostgres, Server, str]]:
    """A running server, what tests do with it, and its template of a messenger database."""
    with (
        tempfile.TemporaryDirectory(prefix="pin_jobs_tests_", dir=fast_folder()) as folder,
        OwnPostgres(Path(folder) / "pg") as postgres,
    ):
        server = Server(postgres.url("postgres"))
        yield postgres, server, create_messenger_template(server)
