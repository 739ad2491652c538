"""`pin-jobs check` on a real Valkey and a real dialog API, and on ones that fail."""

import socket
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from redis import Redis

from pin_jobs.chathouse.check_services import NOBODY, check_adapter, check_dialog_api, check_redis
from pin_jobs.chathouse.dialog_api import InvalidAdapter
from pin_jobs.chathouse.http_dialog_api import InvalidDialogApi
from pin_jobs.chathouse.redis_client import InvalidRedisUrl
from pin_jobs.contract import Finding
from pin_jobs.sandbox.dialog_api import FAULTS, DialogApiServer, Fault
from pin_jobs.sandbox.servers import EmbeddedValkey
from pin_jobs_tests.conftest import DIALOG_API_TOKEN
from pin_jobs_tests.resources import adapters

PASSWORD = "s3cr3t-of-redis"
ADAPTERS = "pin_jobs_tests.resources.adapters"


def as_lines(findings: list[Finding]) -> list[str]:
    return [f"{finding.severity}: {finding.line}" for finding in findings]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


class TestRedis:
    def test_that_works_has_no_findings_and_keeps_nothing_of_it_for_long(self, valkey: Redis, valkey_url: str) -> None:
        assert check_redis(valkey_url) == []
        (mark,) = valkey.keys()
        assert mark.startswith("chathouse:checkPostChatMailDialog:pin-jobs-check-")
        assert 0 < valkey.ttl(mark) <= 10

    def test_that_cannot_be_reached_is_a_warning_because_checks_go_on_without_it(self, closed_port: int) -> None:
        (line,) = as_lines(check_redis(f"redis://:{PASSWORD}@127.0.0.1:{closed_port}/0"))
        assert line.startswith("warning: Redis cannot be reached: checks go on without it")
        assert PASSWORD not in line

    def test_that_accepts_and_says_nothing_is_a_warning(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            (line,) = as_lines(check_redis(f"redis://:{PASSWORD}@127.0.0.1:{listener.getsockname()[1]}/0"))
        assert line.startswith("warning: Redis does not answer in time: ")
        assert PASSWORD not in line

    def test_whose_url_cannot_be_used_is_refused_without_showing_it(self) -> None:
        with pytest.raises(InvalidRedisUrl) as error:
            check_redis(f"redis://:{PASSWORD}@h:port")
        assert PASSWORD not in str(error.value)


@pytest.fixture(scope="module")
def own_valkey() -> Iterator[EmbeddedValkey]:
    """One to be broken; each test mends what it broke."""
    with tempfile.TemporaryDirectory(prefix="pj_") as folder, EmbeddedValkey(Path(folder) / "valkey") as valkey:
        yield valkey


@pytest.fixture
def admin(own_valkey: EmbeddedValkey) -> Iterator[Redis]:
    with Redis.from_url(own_valkey.url) as client:
        yield client


class TestAValkey:
    @pytest.mark.parametrize("password", [f":{PASSWORD}@", ""], ids=["a wrong one", "none"])
    def test_that_wants_another_password_is_an_error(
        self, own_valkey: EmbeddedValkey, admin: Redis, password: str
    ) -> None:
        admin.config_set("requirepass", "another")
        (line,) = as_lines(check_redis(own_valkey.url.replace("redis://", f"redis://{password}")))
        admin.execute_command("AUTH", "another")
        admin.config_set("requirepass", "")
        assert line.startswith("error: Redis does not accept the password, so no task is ever shown")
        assert PASSWORD not in line

    @pytest.mark.parametrize("forbidden", ["set", "mget", "hgetall", "hdel"])
    def test_that_forbids_a_command_of_ours_is_an_error(
        self, own_valkey: EmbeddedValkey, admin: Redis, forbidden: str
    ) -> None:
        rules = ["+@all", f"-{forbidden}"]
        admin.acl_setuser("somebody", enabled=True, passwords=[f"+{PASSWORD}"], keys=["*"], commands=rules)
        (line,) = as_lines(check_redis(own_valkey.url.replace("redis://", f"redis://somebody:{PASSWORD}@")))
        admin.acl_deluser("somebody")
        assert line.startswith("error: Redis refuses (")
        assert PASSWORD not in line

    def test_that_lets_us_have_our_keys_and_commands_alone_has_no_findings(
        self, own_valkey: EmbeddedValkey, admin: Redis
    ) -> None:
        rules = ["-@all", "+@connection", "+set", "+mget", "+hset", "+hsetnx", "+hdel", "+hgetall", "+publish"]
        keys = ["chathouse:checkPostChatMailDialog:*", "chathouse:operator:*"]
        admin.acl_setuser("ours", enabled=True, passwords=[f"+{PASSWORD}"], keys=keys, commands=rules)
        assert check_redis(own_valkey.url.replace("redis://", f"redis://ours:{PASSWORD}@")) == []
        admin.acl_deluser("ours")

    def test_that_is_a_replica_is_an_error(self, own_valkey: EmbeddedValkey, admin: Redis, closed_port: int) -> None:
        admin.replicaof("127.0.0.1", closed_port)
        admin.config_set("replica-serve-stale-data", "yes")
        (line,) = as_lines(check_redis(own_valkey.url))
        admin.replicaof("NO", "ONE")
        assert line.startswith("error: Redis refuses (")

    def test_that_is_out_of_memory_is_a_warning(self, own_valkey: EmbeddedValkey, admin: Redis) -> None:
        admin.config_set("maxmemory", "1")
        (line,) = as_lines(check_redis(own_valkey.url))
        admin.config_set("maxmemory", "0")
        assert line.startswith("warning: Redis refuses (")


def ask(url: str, token: str = DIALOG_API_TOKEN, seconds: float = 10) -> list[str]:
    return as_lines(check_dialog_api(url, token, timeout=timedelta(seconds=seconds)))


class TestTheDialogApi:
    def test_that_knows_no_such_dialog_has_no_findings_and_is_asked_for_one_that_cannot_exist(
        self, dialog_api: DialogApiServer
    ) -> None:
        assert ask(dialog_api.url) == []
        assert dialog_api.asked == [NOBODY]

    def test_that_knows_every_dialog_has_no_findings(self, dialog_api: DialogApiServer) -> None:
        dialog_api.misbehave(Fault(200, body=b'{"messages": [], "mail_limit": {"available": 0}}'))
        assert ask(dialog_api.url) == []

    @pytest.mark.parametrize("status", [400, 404, 405, 410, 422])
    def test_that_answers_something_about_the_dialog_has_no_findings(
        self, dialog_api: DialogApiServer, status: int
    ) -> None:
        dialog_api.misbehave(Fault(status))
        assert ask(dialog_api.url) == []

    def test_that_has_another_token_is_an_error(self, dialog_api: DialogApiServer) -> None:
        (line,) = ask(dialog_api.url, "s3cr3t-of-somebody-else")
        assert line.startswith("error: the token is refused by the dialog API (HTTP 401), so every answer is unknown")
        assert "s3cr3t" not in line

    def test_that_forbids_is_an_error(self, dialog_api: DialogApiServer) -> None:
        dialog_api.misbehave(Fault(403))
        (line,) = ask(dialog_api.url)
        assert line.startswith("error: the token is refused by the dialog API (HTTP 403)")
        assert DIALOG_API_TOKEN not in line

    @pytest.mark.parametrize("fault", ["redirect", "429", "500", "503", "html", "empty", "contract"])
    def test_whose_answers_count_as_unknown_is_a_warning(self, dialog_api: DialogApiServer, fault: str) -> None:
        dialog_api.misbehave(FAULTS[fault])
        (line,) = ask(dialog_api.url)
        assert line.startswith("warning: the dialog API answers, but what it says counts as unknown (")
        assert DIALOG_API_TOKEN not in line

    def test_that_cannot_be_reached_is_a_warning_because_it_may_come_back(self, closed_port: int) -> None:
        (line,) = ask(f"http://127.0.0.1:{closed_port}")
        assert line == (
            "warning: the dialog API gives no answer (cannot be reached (Connection refused)): every answer is "
            "unknown, and no task is created, until it is back"
        )

    def test_that_never_answers_is_a_warning_after_the_timeout(self, dialog_api: DialogApiServer) -> None:
        dialog_api.misbehave(FAULTS["hang"])
        (line,) = ask(dialog_api.url, seconds=0.2)
        assert line.startswith("warning: the dialog API gives no answer (no answer within 0.2 s)")

    @pytest.mark.parametrize(
        ("url", "token"),
        [("http://h/?key=s3cr3t", "token"), ("http://h", "s3cr3t s3cr3t"), ("http://h", "s3cr3t\n\x7f")],
    )
    def test_whose_settings_cannot_be_used_is_refused_without_showing_them(self, url: str, token: str) -> None:
        with pytest.raises(InvalidDialogApi) as error:
            ask(url, token)
        assert "s3cr3t" not in str(error.value)


class TestAnAdapter:
    def test_that_can_be_made_has_no_findings_and_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(adapters.Crm, "closed", 0)
        assert check_adapter(f"{ADAPTERS}:Crm") == []
        assert adapters.Crm.closed == 1

    def test_is_not_asked_for_anything(self) -> None:
        assert check_adapter(f"{ADAPTERS}:Plain") == []

    def test_that_cannot_be_made_is_named(self) -> None:
        with pytest.raises(InvalidAdapter, match="Nobody of the dialog API cannot be made"):
            check_adapter(f"{ADAPTERS}:Nobody")
