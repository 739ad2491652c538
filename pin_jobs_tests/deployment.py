"""A Dagster deployment as a host runs it: a web server, a daemon, PostgreSQL; with our dagster.yaml or as guests."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
import pytest
from dagster import DagsterInstance
from sqlalchemy import make_url

from pin_jobs_tests.factories import Messenger
from pin_jobs_tests.waiting import wait_for

REPOSITORY_ROOT = Path(__file__).parent.parent
JOB = "call_timeout_reaper"
BACKFILL_JOB = f"{JOB}_backfill"
SENSOR = f"{JOB}_sensor"
LOCATION = {"repositoryName": "__repository__", "repositoryLocationName": "pin_jobs"}
UNFINISHED = ("QUEUED", "NOT_STARTED", "STARTING", "STARTED", "CANCELING")
# A code location is imported twice and a database filled, on a machine that may be busy with other things.
STARTUP = 90
# Without bytecode every run would pay for its imports; the rest are settings of whoever runs the tests.
_NOT_INHERITED = (
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONPATH",
    "DAGSTER_",
    "MESSENGER_DATABASE_URL",
    "CHATHOUSE_DATABASE_URL",
    "REDIS_URL",
    "DIALOG_API_",
    "PIN_JOBS_",
    "CALL_TIMEOUT_REAPER_",
    "POST_CHAT_MAIL_",
)


class Server(Protocol):
    """What a deployment needs of the fixture `server`."""

    def url(self, database: str) -> str: ...
    def messenger(self, database: str) -> Messenger: ...
    def create(self, template: str = ...) -> str: ...
    def drop(self, name: str) -> None: ...


def program(name: str) -> str:
    """A program installed beside the interpreter that runs the tests."""
    return str(Path(sys.executable).parent / name)


def host_environment(**variables: str) -> dict[str, str]:
    """The environment of a host that has set these variables and no other of ours or of Dagster's."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    return {**inherited, **variables}


@contextmanager
def running(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process and all its children, ended at the end whatever happened."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY_ROOT,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Dagster:
    """The web server's API: what a person does in the UI."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(timeout=60, trust_env=False)

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        response = self._http.post(f"{self.url}/graphql", json={"query": query, "variables": variables})
        answer = response.json()
        assert "errors" not in answer, answer["errors"]
        return dict(answer["data"])

    def is_ready(self) -> bool:
        """Whether the location is loaded and every daemon that the instance needs is at work."""
        with suppress(httpx.TransportError):
            state = self.ask(_READY)
            daemons = state["instance"]["daemonHealth"]["allDaemonStatuses"]
            locations = state["locationStatusesOrError"]["entries"]
            is_loaded = bool(locations) and all(location["loadStatus"] == "LOADED" for location in locations)
            return all(daemon["healthy"] for daemon in daemons if daemon["required"]) and is_loaded
        return False

    def launch(self, job: str = JOB, location: str = "pin_jobs", **by_hand: Any) -> str:
        """Launch the reaper, or another job, by hand, as `try_to_launch`; return the id of its run."""
        answer = self.try_to_launch(job, location, **by_hand)
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return str(answer["run"]["runId"])

    def try_to_launch(
        self,
        job: str = JOB,
        location: str = "pin_jobs",
        *,
        partition: str | None = None,
        run_config: Any = None,
        ops: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Launch a job by hand, or only some of its ops; return what the API answers."""
        tags = [] if partition is None else [{"key": "dagster/partition", "value": partition}]
        parameters = {
            "selector": {**LOCATION, "repositoryLocationName": location, "jobName": job, "solidSelection": ops},
            "runConfigData": run_config or {},
            "executionMetadata": {"tags": tags},
        }
        return dict(self.ask(_LAUNCH, parameters=parameters)["launchRun"])

    def re_execute(self, run_id: str, strategy: str) -> str:
        """`ALL_STEPS` or `FROM_FAILURE`, as the button on the page of a run; return the id of the new run."""
        answer = self.ask(_RE_EXECUTE, parameters={"parentRunId": run_id, "strategy": strategy})
        assert answer["launchRunReexecution"]["__typename"] == "LaunchRunSuccess", answer
        return str(answer["launchRunReexecution"]["run"]["runId"])

    def launch_backfill(self, *days: str, at_once: bool = False) -> str:
        """Launch the backfill for these days, as its dialog does; `at_once`: not when the daemon next looks."""
        parameters = {
            "selector": {"partitionSetName": f"{BACKFILL_JOB}_partition_set", "repositorySelector": LOCATION},
            "partitionNames": days,
            "forceSynchronousSubmission": at_once,
        }
        answer = self.ask(_BACKFILL, parameters=parameters)["launchPartitionBackfill"]
        assert answer["__typename"] == "LaunchBackfillSuccess", answer
        return str(answer["backfillId"])

    def backfill(self, backfill_id: str) -> tuple[str, dict[str, str]]:
        """The status of a backfill, and that of each of its days."""
        found = self.ask(_BACKFILL_STATUS, backfill=backfill_id)["partitionBackfillOrError"]
        days = found["partitionStatuses"]["results"]
        return found["status"], {day["partitionName"]: day["runStatus"] for day in days}

    def days(self) -> list[str]:
        """The partitions of the backfill."""
        answer = self.ask(_DAYS, repository=LOCATION, name=f"{BACKFILL_JOB}_partition_set")
        return [day["name"] for day in answer["partitionSetOrError"]["partitionsOrError"]["results"]]

    @contextmanager
    def sensor_on(self) -> Iterator[None]:
        """The sensor is switched on for a while, and then back to how it was loaded.

        There is no such thing for off: the daemon may be at a tick, or about to make one, and does not say so. A test
        that needs the sensor off loads it so.
        """
        sensor = {**LOCATION, "sensorName": SENSOR}
        assert self.ask(SENSOR_ON, sensor=sensor)["startSensor"]["__typename"] == "Sensor"
        try:
            yield
        finally:
            self.ask(_SENSOR_RESET, sensor=sensor)

    def terminate(self, run_id: str) -> None:
        answer = self.ask(_TERMINATE, run=run_id)
        assert answer["terminateRun"]["__typename"] == "TerminateRunSuccess", answer

    def delete(self, run_id: str) -> None:
        answer = self.ask(_DELETE, run=run_id)
        assert answer["deletePipelineRun"]["__typename"] == "DeletePipelineRunSuccess", answer

    def run(self, run_id: str) -> dict[str, Any]:
        """Status, tags, times and events of a run."""
        found = dict(self.ask(_RUN, run=run_id)["runOrError"])
        return {**found, "tags": {tag["key"]: tag["value"] for tag in found["tags"]}}

    def status(self, run_id: str) -> str:
        return str(self.run(run_id)["status"])

    def events(self, run_id: str) -> list[dict[str, Any]]:
        return list(self.run(run_id)["eventConnection"]["events"])

    def wait_for_status(self, run_id: str, *statuses: str, timeout: float = 60) -> str:
        def reached() -> str | None:
            status = self.status(run_id)
            assert status in (*statuses, *UNFINISHED), f"run {run_id} is {status}: {self.messages(run_id)}"
            return status if status in statuses else None

        return str(wait_for(reached, timeout, f"run {run_id} to be {' or '.join(statuses)}"))

    def errors(self, run_id: str) -> list[str]:
        """What the events of a run say went wrong, without what that was caused by."""
        return [event["error"]["message"].strip() for event in self.events(run_id) if event.get("error")]

    def messages(self, run_id: str) -> list[str]:
        return [event["message"] for event in self.events(run_id)]

    def pid(self, run_id: str) -> int:
        """The process of a run, as Dagster notes it down when it starts one."""
        entries = [entry for event in self.events(run_id) for entry in event.get("metadataEntries", ())]
        (pid,) = {entry.get("text") or entry.get("intValue") for entry in entries if entry["label"] == "pid"}
        return int(pid)

    def run_ids(self, *statuses: str, job: str = JOB) -> list[str]:
        """Runs of the reaper, or of another job, newest first."""
        return [run["runId"] for run in self.runs(*statuses, job=job)]

    def runs(self, *statuses: str, job: str = JOB) -> list[dict[str, Any]]:
        """The same with status and times."""
        chosen = {"statuses": list(statuses)} if statuses else {}
        return list(self.ask(_RUNS, filter={"pipelineName": job, **chosen})["runsOrError"]["results"])

    def ticks(self, sensor: str = SENSOR, location: str = "pin_jobs") -> list[dict[str, Any]]:
        """Finished ticks of the sensor, newest first: status, timestamp, endTimestamp, skipReason, runIds, error."""
        selector = {**LOCATION, "repositoryLocationName": location, "sensorName": sensor}
        answer = self.ask(_TICKS, sensor=selector)
        return [tick for tick in answer["sensorOrError"]["sensorState"]["ticks"] if tick["status"] != "STARTED"]


@dataclass(frozen=True)
class Host:
    """A deployment in which we are guests, our code location a server of its own.

    `module` is the code location of the host's own; `settings` are added to our dagster.yaml.
    """

    module: str
    settings: str


class CodeServer:
    """Our code location as a server of its own, which whoever supervises it starts again."""

    def __init__(self, home: Path, environment: Mapping[str, str]) -> None:
        self.port = _free_port()
        self._home = home
        self._environment = environment
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._ends = ExitStack()

    def __enter__(self) -> "CodeServer":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def start(self) -> None:
        self._starts += 1
        location = ["-m", "pin_jobs.definitions", "--location-name", "pin_jobs", "--host", "127.0.0.1"]
        command = [program("dagster"), "code-server", "start", *location, "--port", str(self.port)]
        log = self._home / f"code_server_{self._starts}.log"
        self._process = self._ends.enter_context(running(command, log, self._environment))
        wait_for(self._is_listening, STARTUP, "the code server to listen")

    def kill(self) -> None:
        """SIGKILL to itself and to the server below it that has the code loaded; its runs live on."""
        assert self._process is not None
        servers = [psutil.Process(self._process.pid)]
        servers += [child for child in servers[0].children() if "grpc" in child.cmdline()]
        assert len(servers) == 2, servers
        for server in servers:
            server.kill()
        self._process.wait()

    def _is_listening(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False


class Deployment:
    """A web server and a daemon over one messenger database."""

    def __init__(
        self,
        dagster: Dagster,
        messenger: Messenger,
        environment: Mapping[str, str],
        home: Path,
        code_server: CodeServer | None,
    ) -> None:
        self.dagster = dagster
        self.messenger = messenger
        self.environment = environment
        self.home = home
        self._code_server = code_server

    @property
    def code_server(self) -> CodeServer:
        assert self._code_server is not None, "this deployment loads our code location itself"
        return self._code_server

    def log(self, name: str) -> str:
        return (self.home / f"{name}.log").read_text(errors="replace")

    def sessions(self, run_id: str | None = None, *, job: str = JOB) -> list[Mapping[str, Any]]:
        """The server's sessions of one or all runs of a job: pid, application_name, state, wait_event_type, query."""
        return list(
            self.messenger.rows(
                "SELECT pid, application_name, state, wait_event_type, query FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name LIKE :name",
                name=f"{job}/{run_id or '%'}"[:63],
            )
        )

    def locks_of(self, pid: int) -> list[Mapping[str, Any]]:
        return list(self.messenger.rows("SELECT locktype, mode FROM pg_locks WHERE pid = :pid", pid=pid))

    def empty(self) -> None:
        """No calls, no outbox rows, no recorded cycles."""
        self.messenger.run("TRUNCATE messenger.call_sessions, messenger.realtime_outbox, pin_jobs.reaper_cycles")


class _LogsOfFailures:
    """A pytest plugin: shows the end of the deployment's logs beside a failure."""

    def __init__(self, home: Path) -> None:
        self._home = home

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self) -> Any:
        outcome = yield
        report = outcome.get_result()
        if report.failed:
            for log in sorted(self._home.glob("*.log")):
                report.sections.append((log.name, log.read_text(errors="replace")[-8000:]))


@contextmanager
def dagster_records(home: Path, environment: Mapping[str, str]) -> Iterator[DagsterInstance]:
    """Dagster's own records of a deployment: runs, events and ticks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_DATABASE_URL", environment["DAGSTER_DATABASE_URL"])
        with DagsterInstance.from_config(str(home)) as instance:
            yield instance


@contextmanager
def deployment(
    config: pytest.Config,
    server: Server,
    messenger_template: str,
    *,
    messenger_server: Server | None = None,
    host: Host | None = None,
    password: str = "",
    **variables: str,
) -> Iterator[Deployment]:
    """Start a web server and a daemon on databases of their own; end and drop everything afterwards.

    `variables` are added to their environment; `password` goes into the URL of the messenger database. That one is
    copied from the template, on `messenger_server` if there is one.
    """
    with ExitStack() as stack:
        # Short, because Dagster puts unix sockets below it.
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pin_jobs_dagster_")))
        settings = (REPOSITORY_ROOT / "dagster.yaml").read_text()
        (home / "dagster.yaml").write_text(settings + (host.settings if host else ""))
        (home / "tmp").mkdir()
        messenger_server = messenger_server or server
        dagster_database, messenger_database = server.create(), messenger_server.create(messenger_template)
        stack.callback(server.drop, dagster_database)
        stack.callback(messenger_server.drop, messenger_database)
        messenger = messenger_server.messenger(messenger_database)
        environment = host_environment(
            DAGSTER_HOME=str(home),
            TMPDIR=str(home / "tmp"),
            DAGSTER_DATABASE_URL=server.url(dagster_database),
            MESSENGER_DATABASE_URL=_with_password(messenger.jobs_url, password),
            **variables,
        )
        # Filled beforehand: of two processes that find the database empty at the same moment one may fail.
        with dagster_records(home, environment):
            pass
        reporter = _LogsOfFailures(home)
        config.pluginmanager.register(reporter)
        stack.callback(config.pluginmanager.unregister, reporter)
        code_server = stack.enter_context(CodeServer(home, environment)) if host else None
        workspace = _workspace(home, host, code_server)
        port = str(_free_port())
        commands = {
            "webserver": ["dagster-webserver", "-w", workspace, "-h", "127.0.0.1", "-p", port],
            "daemon": ["dagster-daemon", "run", "-w", workspace],
        }
        processes = {
            name: stack.enter_context(running([program(command), *arguments], home / f"{name}.log", environment))
            for name, (command, *arguments) in commands.items()
        }
        # All at once, before each is waited for.
        stack.callback(lambda: [process.terminate() for process in processes.values()])
        dagster = Dagster(f"http://127.0.0.1:{port}")
        _wait_until_ready(dagster, processes, home)
        yield Deployment(dagster, messenger, environment, home, code_server)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _wait_until_ready(dagster: Dagster, processes: Mapping[str, subprocess.Popen[bytes]], home: Path) -> None:
    def ready() -> bool:
        ended = [name for name, process in processes.items() if process.poll() is not None]
        assert not ended, f"{ended} ended at once"
        return dagster.is_ready()

    try:
        wait_for(ready, STARTUP, "the web server and the daemon to be ready")
    except AssertionError as error:
        for name in processes:
            error.add_note(f"--- {name}.log\n{(home / f'{name}.log').read_text(errors='replace')[-8000:]}")
        raise


def _workspace(home: Path, host: Host | None, code_server: CodeServer | None) -> str:
    if host is None or code_server is None:
        return str(REPOSITORY_ROOT / "workspace.yaml")
    ours = {"host": "127.0.0.1", "port": code_server.port, "location_name": "pin_jobs"}
    theirs = {"module_name": host.module, "location_name": "host"}
    path = home / "workspace.yaml"
    # JSON is YAML.
    path.write_text(json.dumps({"load_from": [{"grpc_server": ours}, {"python_module": theirs}]}))
    return str(path)


def _with_password(url: str, password: str) -> str:
    return make_url(url).set(password=password).render_as_string(hide_password=False) if password else url


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_READY = """{
  instance { daemonHealth { allDaemonStatuses { daemonType required healthy } } }
  locationStatusesOrError { ... on WorkspaceLocationStatusEntries { entries { name loadStatus } } }
}"""

_LAUNCH = """mutation ($parameters: ExecutionParams!) {
  launchRun(executionParams: $parameters) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
    ... on RunConfigValidationInvalid { errors { message } }
  }
}"""

_RE_EXECUTE = """mutation ($parameters: ReexecutionParams) {
  launchRunReexecution(reexecutionParams: $parameters) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
  }
}"""

_BACKFILL = """mutation ($parameters: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $parameters) {
    __typename
    ... on LaunchBackfillSuccess { backfillId }
    ... on PythonError { message }
  }
}"""

_BACKFILL_STATUS = """query ($backfill: String!) {
  partitionBackfillOrError(backfillId: $backfill) {
    ... on PartitionBackfill { status partitionStatuses { results { partitionName runStatus } } }
  }
}"""

_DAYS = """query ($repository: RepositorySelector!, $name: String!) {
  partitionSetOrError(repositorySelector: $repository, partitionSetName: $name) {
    ... on PartitionSet { partitionsOrError { ... on Partitions { results { name } } } }
  }
}"""

SENSOR_ON = """mutation ($sensor: SensorSelector!) { startSensor(sensorSelector: $sensor) { __typename } }"""

_SENSOR_RESET = """mutation ($sensor: SensorSelector!) { resetSensor(sensorSelector: $sensor) { __typename } }"""

_TERMINATE = """mutation ($run: String!) {
  terminateRun(runId: $run, terminatePolicy: SAFE_TERMINATE) {
    __typename
    ... on TerminateRunFailure { message }
    ... on PythonError { message }
  }
}"""

_DELETE = """mutation ($run: String!) { deletePipelineRun(runId: $run) { __typename } }"""

_RUN = """query ($run: ID!) {
  runOrError(runId: $run) {
    ... on Run {
      status startTime endTime creationTime tags { key value }
      eventConnection {
        events {
          __typename
          ... on MessageEvent { message timestamp level eventType stepKey }
          ... on ErrorEvent { error { message } }
          ... on EngineEvent { metadataEntries { label ... on TextMetadataEntry { text }
                                                 ... on IntMetadataEntry { intValue } } }
        }
      }
    }
  }
}"""

_RUNS = """query ($filter: RunsFilter) {
  runsOrError(filter: $filter, limit: 500) { ... on Runs { results { runId status creationTime startTime endTime } } }
}"""

_TICKS = """query ($sensor: SensorSelector!) {
  sensorOrError(sensorSelector: $sensor) {
    ... on Sensor { sensorState { status ticks(limit: 100) {
      status timestamp endTimestamp skipReason runIds error { message cause { message } }
    } } }
  }
}"""
