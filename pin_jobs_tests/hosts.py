"""What hosts run: PostgreSQL of other versions and a transaction-pooling PgBouncer, as processes of the tests."""

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import URL

from pin_jobs.sandbox.places import traversable
from pin_jobs.sandbox.servers import silent
from pin_jobs_tests.waiting import wait_for

# None of these programs runs as root; a user that every system has will do for the data of one session.
_ORDINARY_USER = "nobody"
_PGBOUNCER = Path("/usr/sbin/pgbouncer")


def programs_of_debian() -> Path:
    """The programs of PostgreSQL in Debian's packages; of several versions, those of the oldest."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda program: float(program.parts[-3]))
    if not found:
        pytest.skip("no PostgreSQL of Debian's packages: apt-get install postgresql")
    return found[0].parent


def programs_of_the_wheel() -> Path:
    """The programs of PostgreSQL 16 in the wheel `pgserver`."""
    wheel = importlib.util.find_spec("pgserver")
    if wheel is None or wheel.origin is None:
        pytest.skip("no PostgreSQL 16: its wheel, pgserver, is for Python 3.12 and older")
    return Path(wheel.origin).parent / "pginstall/bin"


@contextmanager
def postgres(programs: Path, *, parent: str | None = None) -> Iterator[str]:
    """PostgreSQL in a temporary folder, reached through a Unix socket in there alone; its superuser's URL."""
    with _folder(_ORDINARY_USER, parent) as folder, traversable([programs, folder], silent):
        initdb = [programs / "initdb", "--pgdata=data", "--username=postgres", "--auth=trust", "--encoding=UTF8"]
        subprocess.run([*initdb, "--no-sync"], cwd=folder, check=True, stdout=subprocess.DEVNULL, **_as(_ORDINARY_USER))
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": folder,
            "fsync": "off",
            "full_page_writes": "off",
        }
        command = [programs / "postgres", "-D", "data", *(f"--{name}={value}" for name, value in settings.items())]
        with _running(command, folder, _ORDINARY_USER, stop=signal.SIGINT) as wait_until_it_answers:
            url = f"postgresql://postgres@/postgres?host={folder}"
            wait_until_it_answers(url)
            yield url


@contextmanager
def pgbouncer(server: URL, passwords: Mapping[str, str]) -> Iterator[str]:
    """PgBouncer that pools by transaction, on a port of 127.0.0.1, in front of a server; its URL without a role.

    It lets the roles in `passwords` in, to every database; everything else is as Debian has it.
    """
    if not _PGBOUNCER.exists():
        pytest.skip("no PgBouncer: apt-get install pgbouncer")
    address, port = str(server.query.get("host") or server.host), _free_port()
    # Whoever runs the server may be the only one who gets at its socket.
    user = Path(address).owner() if address.startswith("/") else _ORDINARY_USER
    settings = {
        "pool_mode": "transaction",
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "scram-sha-256",
        "auth_file": "users.txt",
    }
    files = {
        "users.txt": "".join(f'"{role}" "{password}"\n' for role, password in passwords.items()),
        "pgbouncer.ini": f"[databases]\n* = host={address} port={server.port or 5432}\n"
        "[pgbouncer]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()),
    }
    with (
        _folder(user, **files) as folder,
        _running([_PGBOUNCER, "pgbouncer.ini"], folder, user, stop=signal.SIGTERM) as wait_until_it_answers,
    ):
        url = URL.create("postgresql", host="127.0.0.1", port=port)
        role, password = next(iter(passwords.items()))
        a_client = url.set(username=role, password=password, database="postgres")
        wait_until_it_answers(a_client.render_as_string(hide_password=False))
        yield url.render_as_string()


@contextmanager
def _folder(user: str, parent: str | None = None, **files: str) -> Iterator[Path]:
    """A temporary folder with these files, for a program that root would run as that user."""
    with tempfile.TemporaryDirectory(prefix="pin_jobs_host_", dir=parent) as name:
        folder = Path(name)
        for file, content in files.items():
            (folder / file).write_text(content)
        if os.geteuid() == 0:
            for path in (folder, *folder.iterdir()):
                shutil.chown(path, user)
        yield folder


def _as(user: str) -> dict[str, object]:
    if os.geteuid() != 0:
        return {}
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": ()}


@contextmanager
def _running(
    command: Sequence[object], folder: Path, user: str, *, stop: signal.Signals
) -> Iterator[Callable[[str], None]]:
    """A process that works in `folder`, ended at the end whatever happens; gives a way to wait until it answers."""
    # Nothing of ours runs any more when the tests are killed, or when pytest-timeout ends them.
    guard = ["setpriv", "--pdeathsig", "QUIT"] if shutil.which("setpriv") else []
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*guard, *map(str, command)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            **_as(user),  # type: ignore[call-overload]  # these are arguments of Popen
        )

    def answers(url: str) -> bool:
        assert process.poll() is None, f"it ended: {log.read_text(errors='replace')[-4000:]}"
        with suppress(psycopg.OperationalError), psycopg.connect(url, connect_timeout=3):
            return True
        return False

    try:
        yield lambda url: wait_for(lambda: answers(url), 30, f"{command[0]} to answer")
    finally:
        process.send_signal(stop)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
