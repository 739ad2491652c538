"""The sandbox's dialog API against its description, and over the chathouse's database."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup

from pin_jobs.database import connect_to, parse_database_url
from pin_jobs.sandbox.dialog_api import FAULTS, DialogApiServer, DialogsInDatabase
from pin_jobs.sandbox.web import free_port
from pin_jobs_tests.chathouse.factories_chathouse import Chathouse, Dialog
from pin_jobs_tests.conftest import DIALOG_API_TOKEN, REPOSITORY_ROOT
from pin_jobs_tests.waiting import wait_for

MAN = "01HZX3V7Q8R2M4N6P8S0T2W4Y6"
AUTHORIZATION = {"Authorization": f"Bearer {DIALOG_API_TOKEN}"}
schema = schemathesis.openapi.from_path(REPOSITORY_ROOT / "docs/dialog-api.openapi.yaml")
# Not every dialog that the description could name is there.
schema.config.checks.update(excluded_check_names=["positive_data_acceptance"])
OPERATION = schema["/dialogs/{lady_api_id}/{man_ulid}/messages"]["GET"]


@pytest.fixture
def statuses() -> Iterator[set[int]]:
    """What was answered; at the end there must have been more than refusals."""
    seen: set[int] = set()
    yield seen
    assert {200, 404} <= seen


@schema.parametrize()
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_is_asked_is_answered_as_the_description_says(
    case: Any, dialog_api: DialogApiServer, statuses: set[int]
) -> None:
    statuses.add(case.call_and_validate(base_url=dialog_api.url, headers=AUTHORIZATION).status_code)


@pytest.fixture
def get(dialog_api: DialogApiServer) -> Callable[..., httpx.Response]:
    """Asks for a dialog that is there."""

    def once(lady: str = "lady-1", man: str = MAN, **headers: str) -> httpx.Response:
        url = f"{dialog_api.url}/dialogs/{lady}/{man}/messages"
        return httpx.get(url, headers={**AUTHORIZATION, **headers}, trust_env=False)

    return once


@pytest.fixture
def checked(dialog_api: DialogApiServer) -> Callable[[str], Any]:
    """Asks for a dialog that is there while the server misbehaves, and holds the answer against the description."""

    def once(fault: str) -> Any:
        dialog_api.misbehave(FAULTS[fault])
        case = OPERATION.Case(path_parameters={"lady_api_id": "lady-1", "man_ulid": MAN})
        return case.call_and_validate(
            base_url=dialog_api.url,
            headers=AUTHORIZATION,
            excluded_checks=[not_a_server_error],
            allow_redirects=False,
        )

    return once


@pytest.mark.parametrize("fault", ["429", "500", "503", "401"])
def test_a_failure_on_demand_has_the_form_that_the_description_has_for_it(
    checked: Callable[[str], Any], fault: str
) -> None:
    assert checked(fault).status_code == int(fault)


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        ("html", "Undocumented Content-Type"),
        ("empty", "JSON deserialization error"),
        ("contract", "Response violates schema"),
        ("redirect", "Undocumented status code"),
    ],
)
def test_an_answer_that_breaks_the_description_on_demand_does(
    checked: Callable[[str], Any], fault: str, finding: str
) -> None:
    with pytest.raises(FailureGroup, match=finding):
        checked(fault)


@pytest.mark.parametrize("token", ["", "Bearer", "Bearer wrong", DIALOG_API_TOKEN])
def test_without_the_token_nothing_is_said(get: Callable[..., httpx.Response], token: str) -> None:
    response = get(Authorization=token)
    assert (response.status_code, list(response.json())) == (401, ["error"])


class TestFaultsOverHttp:
    def test_come_and_go(self, get: Callable[..., httpx.Response], dialog_api: DialogApiServer) -> None:
        faults = f"{dialog_api.url}/sandbox/faults"
        assert httpx.get(faults, trust_env=False).json() == {"on": "none", "known": list(FAULTS)}
        assert httpx.post(f"{faults}/503", trust_env=False).status_code == 200
        assert [get().status_code for _ in range(3)] == [503, 503, 503]
        assert httpx.get(faults, trust_env=False).json()["on"] == "503"
        assert httpx.delete(faults, trust_env=False).status_code == 200
        assert get().status_code == 200

    def test_may_be_counted(self, get: Callable[..., httpx.Response], dialog_api: DialogApiServer) -> None:
        httpx.post(f"{dialog_api.url}/sandbox/faults/500?times=2", trust_env=False)
        assert [get().status_code for _ in range(3)] == [500, 500, 200]

    @pytest.mark.parametrize("wrong", ["nonsense", "500?times=0", "500?times=x", "500?times=-1"])
    def test_that_nobody_knows_are_refused(self, dialog_api: DialogApiServer, wrong: str) -> None:
        response = httpx.post(f"{dialog_api.url}/sandbox/faults/{wrong}", trust_env=False)
        assert response.status_code == 404
        assert "429" in response.json()["error"]


class TestOverTheDatabase:
    @pytest.fixture
    def find(self, chathouse: Chathouse) -> Callable[[Dialog], Any]:
        dialogs = DialogsInDatabase(chathouse.engine)
        return lambda dialog: dialogs.find(dialog.lady_api_id, dialog.man_ulid)

    def test_a_limit_runs_out_as_mails_are_sent_and_is_there_again_an_hour_later(
        self, chathouse: Chathouse, find: Callable[[Dialog], Any]
    ) -> None:
        dialogs = chathouse.add_chats(chathouse.add_operator(), 40)
        dialog = next(dialog for dialog in dialogs if find(dialog).available == 3)
        mails = 3
        for left in reversed(range(mails)):
            chathouse.add_mail(dialog, "30min")
            assert find(dialog).available == left
        chathouse.add_mail(dialog)
        assert find(dialog).available == 0
        chathouse.run("UPDATE chathouse.inmails SET sent_at = sent_at - interval '1 hour'")
        assert find(dialog).available == mails

    def test_dialogs_differ_in_their_limits(self, chathouse: Chathouse, find: Callable[[Dialog], Any]) -> None:
        dialogs = chathouse.add_chats(chathouse.add_operator(), 40)
        assert {find(dialog).available for dialog in dialogs} == {0, 1, 2, 3}

    def test_what_was_said_is_there_newest_first(self, chathouse: Chathouse, find: Callable[[Dialog], Any]) -> None:
        dialog = chathouse.add_chat(chathouse.add_operator(), "11min")
        chathouse.add_mail(dialog, "5min")
        assert [message["sender"] for message in find(dialog).messages] == ["lady", "man"]

    def test_another_dialog_is_not_there(self, chathouse: Chathouse, find: Callable[[Dialog], Any]) -> None:
        dialog = chathouse.add_chat(chathouse.add_operator())
        assert find(Dialog(dialog.lady, MAN)) is None

    def test_it_answers_as_the_description_says(self, chathouse: Chathouse) -> None:
        dialog = chathouse.add_chat(chathouse.add_operator())
        chathouse.add_mail(dialog)
        with DialogApiServer(DialogsInDatabase(chathouse.engine), DIALOG_API_TOKEN) as server:
            url = f"{server.url}/dialogs/{dialog.lady_api_id}/{dialog.man_ulid}/messages"
            response = httpx.get(url, headers=AUTHORIZATION, trust_env=False)
        assert response.status_code == 200
        assert len(response.json()["messages"]) == 2
        OPERATION.validate_response(response)

    def test_without_its_database_it_fails_and_lives_on(self) -> None:
        away = connect_to(parse_database_url("postgresql://u@127.0.0.1:1/d", variable="x"), application_name="test")
        with DialogApiServer(DialogsInDatabase(away), DIALOG_API_TOKEN) as server:
            url = f"{server.url}/dialogs/lady-1/{MAN}/messages"
            for _ in range(2):
                assert httpx.get(url, headers=AUTHORIZATION, trust_env=False).status_code == 500


class TestTheProgram:
    def start(self, port: int, **environment: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "pin_jobs.sandbox.dialog_api", "--port", str(port)],
            env={**os.environ, "DIALOG_API_TOKEN": DIALOG_API_TOKEN, **environment},
            stderr=subprocess.PIPE,
            text=True,
        )

    def test_serves_until_it_is_told_to_stop(self, chathouse: Chathouse) -> None:
        dialog = chathouse.add_chat(chathouse.add_operator())
        port = free_port(3500)
        url = f"http://127.0.0.1:{port}/dialogs/{dialog.lady_api_id}/{dialog.man_ulid}/messages"

        def answered() -> bool:
            try:
                return httpx.get(url, headers=AUTHORIZATION, trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        process = self.start(port, CHATHOUSE_DATABASE_URL=chathouse.url)
        try:
            wait_for(answered, 30, "the server to answer")
            process.send_signal(signal.SIGTERM)
            assert process.communicate(timeout=10) == (None, "")
            assert process.returncode == 0
        finally:
            process.kill()

    def test_says_in_one_line_what_is_wrong(self) -> None:
        process = self.start(free_port(3500), CHATHOUSE_DATABASE_URL="mysql://u:s3cr3t@h/d")
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 1
        assert errors.startswith("dialog API: CHATHOUSE_DATABASE_URL is not a PostgreSQL URL")
        assert errors.count("\n") == 1
        assert "s3cr3t" not in errors
