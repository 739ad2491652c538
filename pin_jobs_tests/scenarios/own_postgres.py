"""A PostgreSQL server of a test's own, to be stopped, frozen and killed."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from pin_jobs.sandbox.servers import EmbeddedPostgres
from pin_jobs_tests.conftest import Server, create_messenger_template, fast_folder


class OwnPostgres(EmbeddedPostgres):
    """An embedded server that can be frozen, and crash."""

    def freeze(self) -> None:
        """SIGSTOP to all its processes, the parent first: nobody answers, and the kernel takes connections for it."""
        for process in self._oldest_first():
            process.suspend()

    def thaw(self) -> None:
        for process in self._oldest_first():
            process.resume()

    def crash(self, pid: int) -> None:
        """SIGKILL to the process of one session: the server ends all others too, and recovers."""
        psutil.Process(pid).kill()

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
