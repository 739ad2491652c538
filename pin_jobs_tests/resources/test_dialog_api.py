import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from dagster import Definitions, EnvVar, ResourceParam, job, op
from dagster._core.remote_representation.external_data import RepositorySnap
from dagster._serdes import serialize_value

from pin_jobs.chathouse.dialog_api import InvalidAdapter, MailLimit, StageBounds
from pin_jobs.chathouse.http_dialog_api import InvalidDialogApi
from pin_jobs.resources.dialog_api import DialogApiResource
from pin_jobs.resources.redis import RedisResource
from pin_jobs.sandbox.dialog_api import FAULTS, DialogApiServer
from pin_jobs_tests.conftest import DIALOG_API_TOKEN, REPOSITORY_ROOT
from pin_jobs_tests.resources import adapters

MAN = "01HZX3V7Q8R2M4N6P8S0T2W4Y6"
ADAPTERS = "pin_jobs_tests.resources.adapters"


@op
def ask(dialog_api: ResourceParam[DialogApiResource]) -> str:
    with dialog_api.connect() as api:
        return api.mail_limit("lady-1", MAN).limit.value


@op
def mark(redis: ResourceParam[RedisResource]) -> None:
    pass


@job
def ask_and_mark():
    ask()
    mark()


@pytest.fixture
def environment(dialog_api: DialogApiServer, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIALOG_API_URL", dialog_api.url)
    monkeypatch.setenv("DIALOG_API_TOKEN", DIALOG_API_TOKEN)
    monkeypatch.setenv("REDIS_URL", valkey_url)


def definitions() -> Definitions:
    dialog_api = DialogApiResource(url=EnvVar("DIALOG_API_URL"), token=EnvVar("DIALOG_API_TOKEN"))
    return Definitions(
        jobs=[ask_and_mark], resources={"dialog_api": dialog_api, "redis": RedisResource(url=EnvVar("REDIS_URL"))}
    )


@pytest.mark.usefixtures("environment")
def test_a_run_asks_the_api_that_the_environment_names(dialog_api: DialogApiServer) -> None:
    result = definitions().get_repository_def().get_job("ask_and_mark").execute_in_process()
    assert result.output_for_node("ask") == "allowed"
    assert dialog_api.asked == [("lady-1", MAN)]


@pytest.mark.usefixtures("environment")
def test_what_dagster_shows_of_the_resources_is_the_names_of_the_variables(
    dialog_api: DialogApiServer, valkey_url: str
) -> None:
    repository = definitions().get_repository_def()
    shown = serialize_value(RepositorySnap.from_def(repository))
    shown += serialize_value(repository.get_job("ask_and_mark").get_job_snapshot())
    for variable in ("DIALOG_API_URL", "DIALOG_API_TOKEN", "REDIS_URL"):
        assert variable in shown
    for secret in (DIALOG_API_TOKEN, dialog_api.url, valkey_url):
        assert secret not in shown
    assert "Requests of one run at a time" in shown


def test_the_timeout_is_that_of_the_resource(dialog_api: DialogApiServer) -> None:
    dialog_api.misbehave(FAULTS["hang"])
    resource = DialogApiResource(url=dialog_api.url, token=DIALOG_API_TOKEN, timeout_seconds=0.2)
    begun = time.monotonic()
    with resource.connect() as api:
        assert api.mail_limit("lady-1", MAN).reason == "no answer within 0.2 s"
    assert time.monotonic() - begun < 5


def test_what_is_under_way_at_the_end_is_broken_off(dialog_api: DialogApiServer) -> None:
    dialog_api.misbehave(FAULTS["hang"])
    asked: list[str] = []
    with DialogApiResource(url=dialog_api.url, token=DIALOG_API_TOKEN, timeout_seconds=60).connect() as api:
        thread = threading.Thread(target=lambda: asked.append(api.mail_limit("lady-1", MAN).reason))
        thread.start()
    thread.join(10)
    assert asked == ["broken off"]


def test_the_bounds_of_a_stage_are_those_of_the_resource() -> None:
    deadline = timedelta(seconds=45)
    assert DialogApiResource(concurrency=3).bounds(deadline) == StageBounds(concurrency=3, deadline=deadline)


@pytest.mark.parametrize(
    ("url", "token"), [("", "token"), ("http://h", ""), ("http://u:s3cr3t@h", "token"), ("http://h", "s3cr3t\ns3cr3t")]
)
def test_one_that_is_not_configured_says_so_and_shows_nothing(url: str, token: str) -> None:
    with pytest.raises(InvalidDialogApi) as error, DialogApiResource(url=url, token=token).connect():
        pass
    assert "s3cr3t" not in str(error.value)


class TestAnAdapter:
    def test_of_the_host_s_own_is_asked_and_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(adapters.Crm, "closed", 0)
        with DialogApiResource(adapter=f"{ADAPTERS}:Crm").connect() as api:
            answer = api.mail_limit("lady-1", MAN)
            assert adapters.Crm.closed == 0
        assert (answer.limit, answer.reason) == (MailLimit.ALLOWED, f"lady-1, {MAN}")
        assert adapters.Crm.closed == 1

    def test_that_fails_in_the_run_is_closed_all_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(adapters.Crm, "closed", 0)
        with pytest.raises(KeyboardInterrupt), DialogApiResource(adapter=f"{ADAPTERS}:Crm").connect():
            raise KeyboardInterrupt
        assert adapters.Crm.closed == 1

    def test_need_not_be_closed(self) -> None:
        with DialogApiResource(adapter=f" {ADAPTERS}:Plain ").connect() as api:
            assert isinstance(api, adapters.Plain)

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("nowhere:Api", "cannot be made (ModuleNotFoundError)"),
            (f"{ADAPTERS}:Nobody", "cannot be made (AttributeError)"),
            (ADAPTERS, "cannot be made (AttributeError)"),
            (":Api", "cannot be made (ValueError)"),
            (f"{ADAPTERS}:fails", "cannot be made (ValueError)"),
            (f"{ADAPTERS}:lacks_a_variable", "cannot be made (KeyError)"),
            (f"{ADAPTERS}:NoAdapter", "has no method mail_limit"),
        ],
    )
    def test_that_cannot_be_used_is_named(self, name: str, reason: str) -> None:
        with pytest.raises(InvalidAdapter) as error, DialogApiResource(adapter=name).connect():
            pass
        assert str(error.value) == (f"the adapter {name} of the dialog API {reason}; its form is package.module:name")


def test_importing_the_resources_imports_neither_httpx_nor_redis() -> None:
    code = (
        "import sys, pin_jobs.resources.dialog_api, pin_jobs.resources.redis; "
        "print([name for name in ('httpx', 'httpcore', 'anyio', 'redis') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[]", done.stderr


class TestTheExampleOfTheDocumentation:
    """A host that copies it gets something that works."""

    @pytest.fixture
    def crm(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[int, dict[str, str], str]]]:
        """The example as a module `crm_example`, and a CRM that gives these answers: status, headers, body."""
        documentation = (REPOSITORY_ROOT / "docs/dialog-api.md").read_text()
        (example,) = re.findall(r"```python\n(.*?)```", documentation, re.DOTALL)
        (tmp_path / "crm_example.py").write_text(example)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "crm_example", raising=False)
        answers: list[tuple[int, dict[str, str], str]] = []

        class Crm(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                status, headers, body = answers.pop(0)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  # the base class's name
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Crm) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            monkeypatch.setenv("CRM_URL", f"http://127.0.0.1:{server.server_port}")
            monkeypatch.setenv("CRM_KEY", "key")
            monkeypatch.setenv("NO_PROXY", "127.0.0.1")
            yield answers
            server.shutdown()

    def test_answers_in_every_case_and_never_raises(self, crm: list[tuple[int, dict[str, str], str]]) -> None:
        cases = [
            ((200, {}, '{"allowed": 5, "sent": 2}'), MailLimit.ALLOWED),
            ((200, {}, '{"allowed": 5, "sent": 5}'), MailLimit.LIMITED),
            ((200, {}, '{"allowed": 5}'), MailLimit.UNKNOWN),
            ((200, {}, "[]"), MailLimit.UNKNOWN),
            ((200, {}, "<html>"), MailLimit.UNKNOWN),
            ((500, {}, ""), MailLimit.UNKNOWN),
            ((429, {"Retry-After": "soon"}, ""), MailLimit.UNKNOWN),
        ]
        with DialogApiResource(adapter="crm_example:CrmDialogApi").connect() as api:
            for answer, limit in cases:
                crm.append(answer)
                assert api.mail_limit("lady-1", MAN).limit is limit, answer
            crm.append((429, {"Retry-After": "7"}, ""))
            assert api.mail_limit("lady-1", MAN).paused_for == timedelta(seconds=7)
