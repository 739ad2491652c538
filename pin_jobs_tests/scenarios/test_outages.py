"""Under the daemon, as guests of a host that retries failed runs: servers restart, freeze and die beside the jobs."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pin_jobs_tests.deployment import JOB, UNFINISHED, Deployment, Host, deployment
from pin_jobs_tests.factories import a_ringing_call, an_answered_call
from pin_jobs_tests.scenarios.blocking import run_blocked_in
from pin_jobs_tests.scenarios.own_postgres import OwnPostgres, own_postgres
from pin_jobs_tests.waiting import wait_for

pytestmark = pytest.mark.slow

PASSWORD = "s3cret-Pw"
# From the moment at which everything is there again; for a busy machine.
RECOVERY = 60
DAEMON_GRID = 5
UNREACHABLE = "DatabaseUnavailable: the messenger database cannot be reached: "
HOST = Host(
    module="pin_jobs_tests.scenarios.host_location",
    settings="\nrun_retries:\n  enabled: true\n  max_retries: 1\n",
)
THEIR_JOB, THEIR_SENSOR = "failing_job_of_the_host", "sensor_of_the_host"


@pytest.fixture(scope="module")
def postgres_and_host(request: pytest.FixtureRequest, server: Any) -> Iterator[tuple[OwnPostgres, Deployment]]:
    with (
        own_postgres() as (postgres, messenger_server, template),
        deployment(
            request.config, server, template, messenger_server=messenger_server, host=HOST, password=PASSWORD
        ) as started,
    ):
        yield postgres, started


@pytest.fixture
def postgres(postgres_and_host: tuple[OwnPostgres, Deployment]) -> OwnPostgres:
    """The messenger's server; Dagster's own records are elsewhere."""
    return postgres_and_host[0]


@pytest.fixture
def host(postgres_and_host: tuple[OwnPostgres, Deployment]) -> Deployment:
    started = postgres_and_host[1]
    wait_for(lambda: not started.dagster.run_ids(*UNFINISHED), 30, "earlier runs to end")
    started.empty()
    return started


def test_postgresql_that_restarts_between_claim_and_commit_fails_run_and_ticks_clearly_and_all_recovers_unaided(
    postgres: OwnPostgres, host: Deployment, measured: Callable[..., None]
) -> None:
    with run_blocked_in("transition", host) as blocked:
        (call,) = host.messenger.add(a_ringing_call("46s"))
        run_id = blocked.wait().run_id
        postgres.stop()
        stopped = time.time()

        host.dagster.wait_for_status(run_id, "FAILURE")
        # Fails later than ours, so that its retry tells that the daemon has looked at both.
        theirs = host.dagster.launch(THEIR_JOB, "host")
        failed = wait_for(lambda: _ticks_since(host, stopped)[1:], 30, "two ticks without a database")
        away = time.time() - stopped
        postgres.start()
        started = time.time()
    wait_for(lambda: host.messenger.status(call) == "Missed", RECOVERY, "the call to be closed")

    measured("PostgreSQL restarts", away=away, from_start_to_closed=time.time() - started)
    (error,) = {line for line in _errors(host, run_id) if "database" in line}
    assert error.startswith("pin_jobs.database.DatabaseUnavailable: the messenger database hung up (57P01)")
    assert {tick["status"] for tick in failed} == {"FAILURE"}
    assert all(UNREACHABLE in tick["error"]["cause"]["message"] for tick in failed)
    assert len(_ticks_since(host, stopped)) <= (time.time() - stopped) / DAEMON_GRID + 2
    assert len(host.messenger.outbox(call)) == 1
    (retry, failed_run) = wait_for(
        lambda: _two(host.dagster.run_ids(job=THEIR_JOB)), 30, "the host's run to be retried"
    )
    assert failed_run == theirs
    assert host.dagster.run(retry)["tags"]["dagster/parent_run_id"] == theirs
    assert "dagster/parent_run_id" not in [
        tag for id_ in host.dagster.run_ids() for tag in host.dagster.run(id_)["tags"]
    ]


def test_a_frozen_postgresql_fails_ticks_in_seconds_delays_no_other_sensor_and_gets_nothing_late(
    postgres: OwnPostgres, host: Deployment, measured: Callable[..., None]
) -> None:
    before = host.dagster.run_ids()
    (call,) = host.messenger.add(a_ringing_call("35s"))
    postgres.freeze()
    try:
        frozen = time.time()
        wait_for(
            lambda: _overlap(_ticks_since(host, frozen, THEIR_SENSOR, "host"), _ticks_since(host, frozen)),
            40,
            "a tick of their sensor that need not wait for the end of ours",
        )
        ours = _ticks_since(host, frozen)
    finally:
        postgres.thaw()
    wait_for(lambda: host.messenger.status(call) == "Missed", RECOVERY, "the call to be closed")

    seconds = [tick["endTimestamp"] - tick["timestamp"] for tick in ours]
    measured("ticks beside a frozen PostgreSQL", longest=max(seconds), shortest=min(seconds))
    assert {tick["status"] for tick in ours} == {"FAILURE"}
    assert all(UNREACHABLE in tick["error"]["cause"]["message"] for tick in ours)
    assert min(seconds) > 1
    assert max(seconds) < 10
    assert all(not tick["runIds"] for tick in ours)
    (run_id,) = [run_id for run_id in host.dagster.run_ids() if run_id not in before]
    assert [cycle["run_id"] for cycle in host.messenger.cycles()] == [run_id]


def test_a_code_server_that_is_killed_during_a_run_ends_neither_the_run_nor_the_cycles(
    host: Deployment, measured: Callable[..., None]
) -> None:
    with run_blocked_in("write_outbox", host) as blocked:
        calls = host.messenger.add(a_ringing_call("46s"), an_answered_call("5h", "3h"))
        run_id = blocked.wait().run_id
        host.code_server.kill()
        killed = time.time()
        (failed, *_) = wait_for(lambda: _ticks_since(host, killed), 30, "a tick without a code server")
    host.dagster.wait_for_status(run_id, "SUCCESS")
    assert [host.messenger.status(call) for call in calls] == ["Missed", "Failed"]
    assert [cycle["run_id"] for cycle in host.messenger.cycles()] == [run_id]
    assert failed["status"] == "FAILURE"
    assert "user code server" in failed["error"]["message"]

    (call,) = host.messenger.add(a_ringing_call("46s"))
    host.code_server.start()
    started = time.time()
    wait_for(lambda: host.messenger.status(call) == "Missed", RECOVERY, "the next cycle")
    measured("from the start of a new code server to the next commit", seconds=time.time() - started)


def test_nothing_that_the_web_server_shows_or_a_process_logs_holds_the_password(host: Deployment) -> None:
    host.messenger.add(a_ringing_call("46s"))
    host.dagster.wait_for_status(host.dagster.launch(), "SUCCESS")
    host.messenger.add(a_ringing_call("46s"))
    host.messenger.run("ALTER TABLE messenger.realtime_outbox RENAME TO gone")
    host.dagster.wait_for_status(host.dagster.launch(), "FAILURE")
    host.messenger.run("ALTER TABLE messenger.gone RENAME TO realtime_outbox")
    assert PASSWORD in host.environment["MESSENGER_DATABASE_URL"]
    shown = {
        "launchpad": host.dagster.ask(_LAUNCHPAD, job={**_OURS, "pipelineName": JOB}),
        "resources": host.dagster.ask(_RESOURCES, repository=_OURS),
        "runs": [host.dagster.ask(_RUN_PAGE, run=run_id) for run_id in host.dagster.run_ids()],
        "ticks": host.dagster.ticks(),
    }

    assert "messenger_database" in json.dumps(shown["resources"])
    assert "MESSENGER_DATABASE_URL" in json.dumps(shown["launchpad"]) + json.dumps(shown["resources"])
    assert "does not exist" in json.dumps(shown["runs"])
    assert [name for name, answer in shown.items() if PASSWORD in json.dumps(answer)] == []
    logs = sorted(host.home.glob("*.log"))
    assert len(logs) >= 3
    assert [log.name for log in logs if PASSWORD in log.read_text(errors="replace")] == []


def _ticks_since(host: Deployment, moment: float, *sensor: str) -> list[dict[str, Any]]:
    return [tick for tick in host.dagster.ticks(*sensor) if tick["timestamp"] > moment]


def _overlap(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> bool:
    return any(tick["timestamp"] < other["endTimestamp"] < tick["endTimestamp"] for tick in ours for other in theirs)


def _two(items: list[str]) -> list[str]:
    return items if len(items) == 2 else []


def _errors(host: Deployment, run_id: str) -> list[str]:
    """Every line of every error in the events of a run."""
    (run,) = host.dagster.ask(_RUN_PAGE, run=run_id).values()
    return [
        error["message"].strip() for event in run["eventConnection"]["events"] for error in _chain(event.get("error"))
    ]


def _chain(error: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [error, *_chain(error.get("cause"))] if error else []


_OURS = {"repositoryName": "__repository__", "repositoryLocationName": "pin_jobs"}
_LAUNCHPAD = """query ($job: PipelineSelector!) {
  runConfigSchemaOrError(selector: $job) {
    ... on RunConfigSchema {
      rootDefaultYaml
      allConfigTypes { key description ... on CompositeConfigType { fields { name defaultValueAsJson } } }
    }
  }
}"""
_RESOURCES = """query ($repository: RepositorySelector!) {
  allTopLevelResourceDetailsOrError(repositorySelector: $repository) {
    ... on ResourceDetailsList {
      results { name description resourceType configFields { name description defaultValueAsJson }
                configuredValues { key value type } }
    }
  }
}"""
_RUN_PAGE = """query ($run: ID!) {
  runOrError(runId: $run) {
    ... on Run {
      status runConfigYaml tags { key value }
      eventConnection {
        events { ... on MessageEvent { message }
                 ... on ExecutionStepFailureEvent { error { message stack cause { message stack } } }
                 ... on RunFailureEvent { error { message stack cause { message stack } } } }
      }
    }
  }
}"""
