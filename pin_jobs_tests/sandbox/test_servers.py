import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import redis

from pin_jobs.sandbox.errors import SandboxError
from pin_jobs.sandbox.places import plain_path
from pin_jobs.sandbox.processes import processes_in
from pin_jobs.sandbox.servers import EmbeddedPostgres, EmbeddedValkey
from pin_jobs_tests.waiting import wait_for

STARTS_AND_HANGS = """
import sys, time
from pathlib import Path
from pin_jobs.sandbox.servers import EmbeddedPostgres, EmbeddedValkey
EmbeddedPostgres(Path(sys.argv[1]) / "pg").start()
EmbeddedValkey(Path(sys.argv[1]) / "valkey").start()
print("started", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    # Short, unlike tmp_path, and below no folder that only root may enter.
    with tempfile.TemporaryDirectory(prefix="pj_") as name:
        yield Path(name)


def one(postgres: EmbeddedPostgres, query: str) -> object:
    with psycopg.connect(postgres.url("postgres", driver=""), autocommit=True) as connection:
        cursor = connection.execute(query)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def kill_after_it_started_servers(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS_AND_HANGS, str(folder)], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"started\n"
        starter.kill()


def test_postgres_keeps_its_data_between_starts(folder: Path) -> None:
    postgres = EmbeddedPostgres(folder / "pg")
    with postgres:
        postgres.create_database("kept")
        postgres.create_database("kept")
    assert not postgres.is_running()
    with EmbeddedPostgres(folder / "pg") as again:
        assert one(again, "SELECT count(*) FROM pg_database WHERE datname = 'kept'") == 1


def test_one_object_starts_again_after_a_stop(folder: Path) -> None:
    postgres = EmbeddedPostgres(folder / "pg")
    for _ in range(2):
        with postgres:
            assert one(postgres, "SELECT 1") == 1


def test_valkey_keeps_its_data_between_starts(folder: Path) -> None:
    with EmbeddedValkey(folder / "valkey") as valkey:
        redis.Redis.from_url(valkey.url).set("kept", "yes")
    with EmbeddedValkey(folder / "valkey") as valkey:
        assert redis.Redis.from_url(valkey.url).get("kept") == b"yes"
    assert not processes_in(folder / "valkey", "valkey-server")


@pytest.mark.parametrize("name", ["with space", "it's", 'a "quoted" $HOME 100%', "дані", "long" * 30])
def test_a_path_may_hold_any_character(folder: Path, name: str) -> None:
    odd = folder / name
    odd.mkdir()
    with EmbeddedPostgres(odd / "pg") as postgres, EmbeddedValkey(odd / "valkey") as valkey:
        assert one(postgres, "SELECT 1") == 1
        assert redis.Redis.from_url(valkey.url).ping()
    with EmbeddedPostgres(odd / "pg") as postgres:
        assert one(postgres, "SELECT 2") == 2


def test_a_plain_path_is_its_own(folder: Path) -> None:
    assert plain_path(folder) == folder.resolve()
    (folder / "a b").mkdir()
    link = plain_path(folder / "a b")
    assert " " not in str(link)
    assert link.resolve() == (folder / "a b").resolve()


@pytest.mark.parametrize("content", ["", "12", "not a pid\n", "{pid}\n{folder}\n1\n5432\n{folder}\n\n 1 2\nready\n"])
def test_a_stale_pid_file_is_discarded(folder: Path, content: str) -> None:
    postgres = EmbeddedPostgres(folder / "pg")
    with postgres:
        pass
    pid_file = folder / "pg" / "data" / "postmaster.pid"
    pid_file.write_text(content.format(pid=os.getpid(), folder=pid_file.parent))
    with postgres:
        assert one(postgres, "SELECT 1") == 1


def test_an_interrupted_initialisation_is_begun_anew(folder: Path) -> None:
    (folder / "pg" / "data").mkdir(parents=True)
    (folder / "pg" / "data" / "PG_VERSION").write_text("18\n")
    with EmbeddedPostgres(folder / "pg") as postgres:
        assert one(postgres, "SELECT 1") == 1


def test_servers_left_by_a_killed_process_are_taken_over_and_stopped(folder: Path) -> None:
    kill_after_it_started_servers(folder)
    data = folder / "pg" / "data"
    postmaster = (data / "postmaster.pid").read_text().split()[0]
    [old_valkey] = processes_in(folder / "valkey", "valkey-server")
    with EmbeddedPostgres(folder / "pg") as postgres, EmbeddedValkey(folder / "valkey"):
        assert one(postgres, "SELECT 1") == 1
        assert (data / "postmaster.pid").read_text().split()[0] == postmaster
        assert not psutil.pid_exists(old_valkey.pid) or old_valkey.status() == psutil.STATUS_ZOMBIE
    assert not processes_in(data, "postgres")
    assert not processes_in(folder / "valkey", "valkey-server")


def test_a_postmaster_killed_with_9_recovers(folder: Path) -> None:
    postgres = EmbeddedPostgres(folder / "pg")
    with postgres:
        postmaster = int((folder / "pg" / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGKILL)
        wait_for(lambda: not postgres.is_running(), 10, "the backends to follow their postmaster")
    with postgres:
        assert one(postgres, "SELECT 1") == 1


def test_a_server_restarted_by_somebody_else_is_stopped_too(folder: Path) -> None:
    postgres = EmbeddedPostgres(folder / "pg")
    with postgres:
        os.kill(int((folder / "pg" / "data" / "postmaster.pid").read_text().split()[0]), signal.SIGINT)
        wait_for(lambda: not postgres.is_running(), 10, "the server to stop")
        kill_after_it_started_servers(folder)
        assert postgres.is_running()
    assert not postgres.is_running()
    with EmbeddedValkey(folder / "valkey"):
        pass


def test_a_server_that_cannot_start_says_why_in_one_line(folder: Path) -> None:
    with EmbeddedPostgres(folder / "pg"):
        pass
    with (folder / "pg" / "data" / "postgresql.conf").open("a") as file:
        file.write("nonsense = on\n")
    with pytest.raises(SandboxError, match=r"pg/data/log ends with: .*configuration file") as caught:
        EmbeddedPostgres(folder / "pg").start()
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs PostgreSQL as another user")
def test_as_root_parents_can_be_passed_through_but_not_read(folder: Path) -> None:
    (folder / "private" / "inner").mkdir(parents=True)
    (folder / "private").chmod(0o700)
    said: list[str] = []
    with EmbeddedPostgres(folder / "private" / "inner" / "pg", said.append):
        assert (folder / "private").stat().st_mode & 0o777 == 0o711
    assert any("private" in line for line in said)


def test_a_valkey_that_ended_starts_again_on_its_port_and_with_its_data(folder: Path) -> None:
    with EmbeddedValkey(folder / "valkey") as valkey:
        url = valkey.url
        with redis.Redis.from_url(url) as client:
            client.set("kept", "yes")
        [process] = processes_in(folder / "valkey", "valkey-server")
        process.kill()
        wait_for(lambda: not valkey.is_running(), 10, "the server to end")
        valkey.start()
        assert valkey.url == url
        with redis.Redis.from_url(url) as client:
            assert client.get("kept") == b"yes"
        assert not process.is_running()
