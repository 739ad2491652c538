"""The tear-down of a run fails: what the run says about its cycle is true, and nothing half-done is committed."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from dagster import DagsterInstance, EnvVar, EventLogEntry, ExecuteInProcessResult, InitResourceContext

from pin_jobs.database import LOCK_NAMESPACE
from pin_jobs.messenger.batch import LIVE_CYCLE_LOCK
from pin_jobs.messenger.jobs import build_call_timeout_reaper
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.resources.postgres import PostgresResource
from pin_jobs_tests.conftest import JOBS_ROLE
from pin_jobs_tests.factories import Messenger, a_ringing_call, an_answered_call
from pin_jobs_tests.scenarios.breaking import broken
from pin_jobs_tests.waiting import wait_for

TAKE_RUN_LOCK = f"SELECT pg_advisory_xact_lock({LOCK_NAMESPACE}, {LIVE_CYCLE_LOCK})"
HANG_UP = "PERFORM pg_terminate_backend(pg_backend_pid())"


class DatabaseOfTheHost(PostgresResource):
    """A resource of the host's, whose tear-down fails after that of ours."""

    def teardown_after_execution(self, context: InitResourceContext) -> None:  # noqa: ARG002  # Dagster's signature
        raise RuntimeError("the tear-down fails")


@contextmanager
def nothing_wrong(messenger: Messenger) -> Iterator[None]:
    assert messenger
    yield


@contextmanager
def lock_held(messenger: Messenger) -> Iterator[None]:
    with messenger.holding(TAKE_RUN_LOCK):
        yield


@contextmanager
def update_broken(messenger: Messenger) -> Iterator[None]:
    with broken(messenger, "messenger.call_sessions"):
        yield


@contextmanager
def session_lost_in_the_record(messenger: Messenger) -> Iterator[None]:
    """So that our own tear-down, too, finds nothing that it could roll back."""
    with broken(messenger, "pin_jobs.reaper_cycles", how=HANG_UP):
        yield


@pytest.mark.usefixtures("pin_jobs_environment")
@pytest.mark.parametrize(
    ("circumstances", "succeeds", "commits"),
    [
        (nothing_wrong, True, True),
        (lock_held, True, False),
        (update_broken, False, False),
        (session_lost_in_the_record, False, False),
    ],
)
def test_a_tear_down_that_fails_changes_nothing_about_what_is_committed(
    messenger: Messenger, circumstances, succeeds: bool, commits: bool
) -> None:
    messenger.add(a_ringing_call("46s"), an_answered_call("5h", "3h"))
    with circumstances(messenger):
        run = execute()
    # A run whose tear-down alone fails stays a success; the op that commits says whether it did.
    assert run.success is succeeds
    assert said_to_be_committed(run) is commits
    assert len(messenger.cycles()) == commits
    assert messenger.statuses() == ({"Missed": 1, "Failed": 1} if commits else {"Ringing": 1, "Answered": 1})
    assert len(messenger.outbox()) == 2 * commits
    assert messenger.locks() == []
    of_the_jobs = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND usename = :role"
    wait_for(lambda: not messenger.rows(of_the_jobs, role=JOBS_ROLE), 5, "the session of the run to be gone")
    assert any("the tear-down fails" in str(event.message) + error_of(event) for event in run.all_events)


@pytest.mark.usefixtures("pin_jobs_environment")
@pytest.mark.parametrize("op", ["claim", "transition"])
def test_a_run_that_breaks_between_its_ops_commits_nothing_in_its_tear_down(
    messenger: Messenger, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """All statements went well, and the transaction could be committed."""
    messenger.add(a_ringing_call("46s"), an_answered_call("5h", "3h"))
    handle = DagsterInstance.handle_new_event

    def lose_the_storage_of_dagster(instance: DagsterInstance, event: EventLogEntry, **options: object) -> object:
        what = event.dagster_event
        if what and what.is_successful_output and what.step_key == op:
            raise ConnectionError("Dagster's own database is gone")
        return handle(instance, event, **options)

    monkeypatch.setattr(DagsterInstance, "handle_new_event", lose_the_storage_of_dagster)
    assert not execute().success
    assert messenger.statuses() == {"Ringing": 1, "Answered": 1}
    assert messenger.outbox() == messenger.cycles() == messenger.locks() == []


def execute() -> ExecuteInProcessResult:
    database = DatabaseOfTheHost(url=EnvVar("MESSENGER_DATABASE_URL"))
    job = build_call_timeout_reaper(CallTimeoutReaperOptions(), database)
    with DagsterInstance.ephemeral() as instance:
        return job.execute_in_process(instance=instance, raise_on_error=False)


def said_to_be_committed(run: ExecuteInProcessResult) -> bool:
    outputs = [event for event in run.all_node_events if event.is_successful_output]
    return any(
        event.step_key == "write_outbox" and event.step_output_data.metadata["committed"].value for event in outputs
    )


def error_of(event) -> str:
    error = getattr(event.event_specific_data, "error", None)
    return error.to_string() if error else ""
