"""`dagster job execute`, as somebody does who has nothing but the messenger database: no DAGSTER_HOME, no daemon."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pin_jobs.sandbox.host_tables import create_messenger_tables
from pin_jobs_tests.conftest import Server
from pin_jobs_tests.deployment import JOB, REPOSITORY_ROOT, host_environment, program
from pin_jobs_tests.factories import Messenger, a_finished_call, a_ringing_call, an_answered_call

TABLES_OF_OURS = "SELECT count(*) FROM pg_tables WHERE schemaname = 'pin_jobs'"


@pytest.fixture
def database(request: pytest.FixtureRequest, server: Server, messenger_template: str) -> Iterator[Messenger]:
    """Migrated, or with the contract's tables and nothing of ours."""
    if request.param == "migrated":
        name = server.create(messenger_template)
    else:
        name = server.create()
        create_messenger_tables(server.url(name))
    yield Messenger(server.url(name))
    server.drop(name)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return REPOSITORY_ROOT if request.param == "the repository" else tmp_path


@pytest.mark.parametrize(
    ("folder", "database"),
    [("the repository", "contract only"), ("an empty folder", "migrated")],
    indirect=True,
    ids=["in the repository, not migrated", "in an empty folder, migrated"],
)
def test_a_job_executed_by_hand_closes_what_is_due_and_nothing_else(database: Messenger, folder: Path) -> None:
    ringing, answered = database.add(a_ringing_call("46s"), an_answered_call("5h", "3h"))
    others = database.add(a_ringing_call("5s"), an_answered_call("5h", "1h"), a_finished_call("Declined", "5h"))
    untouched = [database.call(call) for call in others]
    has_schema = bool(database.value(TABLES_OF_OURS))

    ended = subprocess.run(
        [program("dagster"), "job", "execute", "-m", "pin_jobs.definitions", "-j", JOB],
        cwd=folder,
        env=host_environment(MESSENGER_DATABASE_URL=database.url),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [database.status(call) for call in (ringing, answered)] == ["Missed", "Failed"]
    assert [database.call(call) for call in others] == untouched
    assert {row["payload"]["callId"] for row in database.outbox()} == {str(ringing.id), str(answered.id)}
    assert bool(database.value(TABLES_OF_OURS)) is has_schema
    if has_schema:
        assert len(database.cycles()) == 1
    else:
        assert "run `pin-jobs migrate`" in ended.stderr
    assert list(folder.iterdir()) == [] or folder == REPOSITORY_ROOT


def test_a_job_executed_by_hand_without_a_database_says_so_in_one_line_and_fails(tmp_path: Path) -> None:
    nowhere = "postgresql://reaper:s3cret-Pw@127.0.0.1:9/messenger"
    ended = subprocess.run(
        [program("dagster"), "job", "execute", "-m", "pin_jobs.definitions", "-j", JOB],
        cwd=tmp_path,
        env=host_environment(MESSENGER_DATABASE_URL=nowhere),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode != 0
    assert "the messenger database cannot be reached" in ended.stderr
    assert "s3cret-Pw" not in ended.stdout + ended.stderr


@pytest.mark.parametrize("database", ["migrated"], indirect=True)
def test_a_job_executed_by_hand_refuses_a_nonsense_size_and_touches_nothing(
    database: Messenger, tmp_path: Path
) -> None:
    database.add(a_ringing_call("46s"))
    config = tmp_path / "run.yaml"
    config.write_text("batch_size: 10001\n")
    ended = subprocess.run(
        [program("dagster"), "job", "execute", "-m", "pin_jobs.definitions", "-j", JOB, "-c", str(config)],
        cwd=tmp_path,
        env=host_environment(MESSENGER_DATABASE_URL=database.url),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode != 0
    assert "InvalidRunConfig: batch_size is 10001; allowed is 1 to 10000" in ended.stderr
    assert (database.statuses(), database.cycles()) == ({"Ringing": 1}, [])
