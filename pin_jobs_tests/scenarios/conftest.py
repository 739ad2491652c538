"""What the scenarios share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import pytest
from sqlalchemy import make_url

from pin_jobs_tests import hosts
from pin_jobs_tests.conftest import JOBS_ROLE, ROLE_PASSWORD, Server, create_messenger_template, fast_folder
from pin_jobs_tests.factories import Messenger
from pin_jobs_tests.scenarios.clock import DatabaseClock

HOSTS = ("debian", "16", "18", "pgbouncer")


@dataclass(frozen=True)
class HostServer:
    """A server of a host, and perhaps a pooler that all but its administrator go through."""

    server: Server
    template: str
    pooler: str | None = None

    def client_url(self, url: str) -> str:
        """What a client of the host is given for a URL of the server itself."""
        if self.pooler is None:
            return url
        direct, pooler = make_url(url), make_url(self.pooler)
        pooled = pooler.set(
            username=direct.username, password=direct.password or ROLE_PASSWORD, database=direct.database
        )
        return pooled.render_as_string(hide_password=False)

    @contextmanager
    def messenger(self) -> Iterator[Messenger]:
        """A database as in the fixture `messenger`; the jobs are clients."""
        name = self.server.create(self.template)
        direct = self.server.messenger(name)
        yield replace(direct, jobs_url=self.client_url(direct.jobs_url))
        self.server.drop(name)


@pytest.fixture(scope="session")
def start_host(server: Server, messenger_template: str) -> Iterator[Callable[[str], HostServer]]:
    """Starts one of HOSTS, the first time that it is asked for; skips the test where the programs are missing.

    The oldest PostgreSQL of Debian's packages, 16, the embedded one (18), and PgBouncer in front of that.
    """
    started = {"18": HostServer(server, messenger_template)}
    with ExitStack() as stack:

        def start(host: str) -> HostServer:
            if host not in started:
                started[host] = _pooled(started["18"], stack) if host == "pgbouncer" else _installed(host, stack)
            return started[host]

        yield start


def _pooled(host: HostServer, stack: ExitStack) -> HostServer:
    direct = make_url(host.server.url("postgres"))
    passwords = {JOBS_ROLE: ROLE_PASSWORD, str(direct.username): str(direct.password or ROLE_PASSWORD)}
    return replace(host, pooler=stack.enter_context(hosts.pgbouncer(direct, passwords)))


def _installed(host: str, stack: ExitStack) -> HostServer:
    programs = hosts.programs_of_debian() if host == "debian" else hosts.programs_of_the_wheel()
    server = Server(stack.enter_context(hosts.postgres(programs, parent=fast_folder())))
    return HostServer(server, create_messenger_template(server))


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Notes figures down, on one line of the output and as properties of the report."""

    def note(what: str, **figures: float) -> None:
        for name, value in figures.items():
            record_property(name, value)
        line = ", ".join(
            f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.3g}" for name, value in figures.items()
        )
        print(f"\n{what}: {line}")  # noqa: T201  # figures are for people

    return note


@pytest.fixture
def clock(messenger: Messenger) -> DatabaseClock:
    """The clock of the test's database, set by hand from here on."""
    return DatabaseClock(messenger)
