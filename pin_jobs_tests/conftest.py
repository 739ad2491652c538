"""Real servers for the tests: one PostgreSQL a session, one database a test, copied from a template."""

import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis import Redis
from sqlalchemy import Engine, make_url

from pin_jobs.database import connect_to, parse_database_url
from pin_jobs.messenger.batch import CycleResult, ReapBatch, RunLockBusy
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.migrations import migrate_chathouse, migrate_messenger
from pin_jobs.sandbox.dialog_api import DialogApiServer, DialogsInMemory
from pin_jobs.sandbox.host_tables import create_chathouse_tables, create_messenger_tables
from pin_jobs.sandbox.servers import EmbeddedPostgres, EmbeddedValkey
from pin_jobs_tests.chathouse.factories_chathouse import Chathouse
from pin_jobs_tests.factories import Messenger
from pin_jobs_tests.proxy import Proxy

TEMPLATE = "messenger_template"
CHATHOUSE_TEMPLATE = "chathouse_template"
REPOSITORY_ROOT = Path(__file__).parent.parent
# The least-privilege role that the jobs run as in all tests, made by the file that hosts are given.
GRANTS = (REPOSITORY_ROOT / "deploy/sql/grants.sql").read_text()
JOBS_ROLE = "pin_jobs_reaper"
CHATHOUSE_GRANTS = (REPOSITORY_ROOT / "deploy/sql/grants_chathouse.sql").read_text()
CHATHOUSE_ROLE = "pin_jobs_post_chat_mail"
# Looked for in messages, where no password may ever appear.
ROLE_PASSWORD = "s3cr3t-of-a-role"
DIALOG_API_TOKEN = "s3cr3t-token-of-the-dialog-api"
PREFIXES = (
    "MESSENGER_DATABASE_URL",
    "CHATHOUSE_DATABASE_URL",
    "REDIS_URL",
    "DIALOG_API_",
    "PIN_JOBS_SENSORS",
    "CALL_TIMEOUT_REAPER_",
    "POST_CHAT_MAIL_",
)


def pytest_xdist_auto_num_workers() -> int:
    """As many as there are cores: whole deployments run in some, and with more of them tests would miss limits."""
    return max(2, min(8, os.cpu_count() or 1))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In parallel, the files that take longest come first: those with whole deployments."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.parent.name not in {"e2e", "scenarios"})


class Server:
    """A PostgreSQL server on which tests make databases."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url)
        self._roles: list[str] = []

    def url(self, database: str, *, role: str | None = None) -> str:
        url = self._url.set(database=database)
        if role is not None:
            url = url.set(username=role, password=ROLE_PASSWORD)
        return url.render_as_string(hide_password=False)

    def run(self, sql: str, *, database: str = "postgres") -> None:
        engine = connect_to(parse_database_url(self.url(database), variable="tests"), application_name="tests")
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql(sql)

    def create(self, template: str = "template1") -> str:
        name = f"test_{uuid.uuid4().hex[:12]}"
        self.run(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def drop(self, name: str) -> None:
        self.run(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def create_role(self) -> str:
        """An ordinary role, that may log in and nothing else; dropped with the server's last database."""
        name = f"role_{uuid.uuid4().hex[:12]}"
        self.run(f"CREATE ROLE {name} LOGIN PASSWORD '{ROLE_PASSWORD}'")
        self._roles.append(name)
        return name

    def grant(self, database: str, *, grants: str = GRANTS, role: str = JOBS_ROLE) -> None:
        """Make the jobs' role, if it is missing, and give it in this database what the file of grants does."""
        self.run(grants.replace("%", "%%"), database=database)
        self.run(f"ALTER ROLE {role} PASSWORD '{ROLE_PASSWORD}'")

    def messenger(self, database: str) -> Messenger:
        """A database that `grant` was run in, or one copied from such a one."""
        return Messenger(self.url(database), self.url(database, role=JOBS_ROLE))

    def drop_roles(self) -> None:
        for name in self._roles:
            self.run(f"DROP ROLE {name}")


def fast_folder() -> str | None:
    """Where three hundred small files a test cost nothing: in memory, if there is plenty of it."""
    memory = Path("/dev/shm")
    with suppress(OSError):
        if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 8 * 2**30:
            return str(memory)
    return None


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The embedded server, or the one at PIN_JOBS_TEST_POSTGRES_URL (a superuser's), for other versions."""
    if url := os.environ.get("PIN_JOBS_TEST_POSTGRES_URL"):
        assert "PYTEST_XDIST_WORKER" not in os.environ, "tests in parallel would take the one server from each other"
        server = Server(url)
        server.run(f"DROP ROLE IF EXISTS {JOBS_ROLE}, {CHATHOUSE_ROLE}")
        yield server
        server.run(f"DROP ROLE IF EXISTS {JOBS_ROLE}, {CHATHOUSE_ROLE}")
        server.drop_roles()
        return
    with (
        tempfile.TemporaryDirectory(prefix="pin_jobs_tests_", dir=fast_folder()) as folder,
        EmbeddedPostgres(Path(folder) / "pg") as server,
    ):
        embedded = Server(server.url("postgres"))
        # A database a test: most of the time would go into waiting for the disk.
        for setting in ("fsync", "full_page_writes", "wal_init_zero"):
            embedded.run(f"ALTER SYSTEM SET {setting} = off")
        embedded.run("SELECT pg_reload_conf()")
        yield embedded


def create_messenger_template(server: Server) -> str:
    """A messenger database that follows the contract, migrated, empty; the jobs have their own role in it."""
    server.drop(TEMPLATE)
    server.run(f"CREATE DATABASE {TEMPLATE}")
    create_messenger_tables(server.url(TEMPLATE))
    migrate_messenger(server.url(TEMPLATE))
    server.grant(TEMPLATE)
    return TEMPLATE


@pytest.fixture(scope="session")
def messenger_template(server: Server) -> Iterator[str]:
    yield create_messenger_template(server)
    server.drop(TEMPLATE)


@pytest.fixture
def messenger(server: Server, messenger_template: str) -> Iterator[Messenger]:
    """A messenger database of one test, copied from the template."""
    name = server.create(messenger_template)
    yield server.messenger(name)
    server.drop(name)


@pytest.fixture(scope="session")
def chathouse_template(server: Server) -> Iterator[str]:
    server.drop(CHATHOUSE_TEMPLATE)
    server.run(f"CREATE DATABASE {CHATHOUSE_TEMPLATE}")
    create_chathouse_tables(server.url(CHATHOUSE_TEMPLATE))
    migrate_chathouse(server.url(CHATHOUSE_TEMPLATE))
    server.grant(CHATHOUSE_TEMPLATE, grants=CHATHOUSE_GRANTS, role=CHATHOUSE_ROLE)
    yield CHATHOUSE_TEMPLATE
    server.drop(CHATHOUSE_TEMPLATE)


@pytest.fixture
def chathouse(server: Server, chathouse_template: str) -> Iterator[Chathouse]:
    """A chathouse database that follows the contract, empty."""
    name = server.create(chathouse_template)
    yield Chathouse(server.url(name), server.url(name, role=CHATHOUSE_ROLE))
    server.drop(name)


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """A Valkey for all tests; those that stop or break one start one of their own."""
    with (
        tempfile.TemporaryDirectory(prefix="pin_jobs_tests_", dir=fast_folder()) as folder,
        EmbeddedValkey(Path(folder) / "valkey") as valkey,
    ):
        yield valkey.url


@pytest.fixture
def valkey(valkey_url: str) -> Iterator[Redis]:
    """A client of that Valkey, which is empty; its URL is the fixture `valkey_url`."""
    with Redis.from_url(valkey_url, decode_responses=True) as client:
        client.flushall()
        yield client


@pytest.fixture
def dialog_api() -> Iterator[DialogApiServer]:
    """The sandbox's dialog API over HTTP, which behaves until it is told not to; all ladies of the factories are there.

    Three mails are left in every dialog but those in `dialog_api.dialogs.limits`.
    """
    with DialogApiServer(DialogsInMemory(), DIALOG_API_TOKEN) as server:
        yield server


@pytest.fixture
def empty_database(server: Server) -> Iterator[str]:
    """The URL of a database with nothing in it."""
    name = server.create()
    yield server.url(name)
    server.drop(name)


@pytest.fixture
def new_batch(messenger: Messenger) -> Iterator[Callable[..., ReapBatch]]:
    """Makes batches, each of its own run; closes them after the test."""
    batches: list[ReapBatch] = []

    def make(
        *,
        engine: Engine | None = None,
        run_id: str | None = None,
        day: date | None = None,
        is_dry_run: bool = False,
        **options: object,
    ) -> ReapBatch:
        batch = ReapBatch(
            engine or messenger.jobs_engine,
            CallTimeoutReaperOptions(**options),  # type: ignore[arg-type]  # tests pass options by name
            run_id=run_id or str(uuid.uuid4()),
            job_name="call_timeout_reaper",
            log=logging.getLogger("pin_jobs_tests"),
            day=day,
            is_dry_run=is_dry_run,
        )
        batches.append(batch)
        return batch

    yield make
    for batch in batches:
        batch.close()


@pytest.fixture
def reap(new_batch: Callable[..., ReapBatch]) -> Callable[..., CycleResult | RunLockBusy]:
    """Runs a whole cycle and returns its result, or who holds the lock."""

    def run(**options: object) -> CycleResult | RunLockBusy:
        batch = new_batch(**options)
        claim = batch.claim()
        if isinstance(claim, RunLockBusy):
            return claim
        return batch.write_outbox(batch.transition(claim))

    return run


@pytest.fixture
def behind_proxy() -> Iterator[Callable[..., Engine]]:
    """Makes engines whose connections go through a network that fails as it is told to."""
    with ExitStack() as proxies:

        def make(url: str, **faults: object) -> Engine:
            proxy = proxies.enter_context(Proxy(url, **faults))  # type: ignore[arg-type]  # tests pass faults by name
            return connect_to(parse_database_url(proxy.url, variable="URL of the test"), application_name="test")

        yield make


@pytest.fixture
def frozen_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose clock stands still, as that of a suspended machine does: only the server's limits count."""
    frozen_at = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: frozen_at, sleep=time.sleep)
    monkeypatch.setattr("pin_jobs.messenger.transaction.time", clock)


class Interrupted(BaseException):
    """What a run's process raises on Terminate, from a signal handler."""


@pytest.fixture
def interrupt_worker() -> Iterator[Callable[[], None]]:
    """Interrupts the main thread, wherever it is."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def pin_jobs_environment(messenger: Messenger, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a host that has the messenger database and nothing else."""
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        monkeypatch.delenv(name)
    environment = {"MESSENGER_DATABASE_URL": messenger.jobs_url}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment
