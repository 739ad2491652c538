"""The HTTP client against the sandbox's dialog API, over real sockets, and against servers that speak no HTTP."""

import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import trustme

from pin_jobs.chathouse.dialog_api import DialogId, MailLimit, MailLimitAnswer, StageBounds, ask_all
from pin_jobs.chathouse.http_dialog_api import MAX_BYTES, HttpDialogApi, InvalidDialogApi, retry_after
from pin_jobs.sandbox.dialog_api import FAULTS, DialogApiServer, DialogsInMemory, Fault
from pin_jobs_tests.chathouse.factories_chathouse import new_ulid
from pin_jobs_tests.conftest import DIALOG_API_TOKEN
from pin_jobs_tests.waiting import wait_for

MAN = "01HZX3V7Q8R2M4N6P8S0T2W4Y6"
MESSAGE = {"id": "1", "sender": "man", "sent_at": "2026-01-31T22:54:00Z"}
# Long enough for a busy machine; who waits for its end takes a shorter one.
TIMEOUT = timedelta(seconds=30)
LATE = {
    "30 seconds": Fault(delay=30),
    "hangs": FAULTS["hang"],
    "drips": FAULTS["drip"],
    "drips from the first byte": Fault(drip=0.1, drips_head=True),
    "drips without end": Fault(headers={"Transfer-Encoding": "chunked"}, body=b"1\r\n \r\n", drip=0.05, repeated=999),
}
PROMPT = {name: fault for name, fault in FAULTS.items() if name not in {"slow", "hang", "drip"}}


@pytest.fixture
def connect() -> Iterator[Callable[..., HttpDialogApi]]:
    """Makes clients, closed after the test."""
    made: list[HttpDialogApi] = []

    def make(url: str, token: str = DIALOG_API_TOKEN, **options: Any) -> HttpDialogApi:
        made.append(HttpDialogApi(url, token, **{"timeout": TIMEOUT, **options}))
        return made[-1]

    yield make
    for api in made:
        api.close()


@pytest.fixture
def api(dialog_api: DialogApiServer, connect: Callable[..., HttpDialogApi]) -> HttpDialogApi:
    return connect(dialog_api.url)


@pytest.fixture
def ask(api: HttpDialogApi, dialog_api: DialogApiServer) -> Callable[[Fault], MailLimitAnswer]:
    """Asks once for a dialog that the server answers for with a fault."""

    def once(fault: Fault) -> MailLimitAnswer:
        dialog_api.misbehave(fault, times=1)
        return api.mail_limit("lady-1", MAN)

    return once


def answering(answer: object) -> Fault:
    return Fault(body=json.dumps(answer).encode())


@pytest.mark.parametrize(
    ("left", "limit"), [(0, MailLimit.LIMITED), (1, MailLimit.ALLOWED), (10**30, MailLimit.ALLOWED)]
)
def test_the_mails_that_are_left_decide(
    api: HttpDialogApi, dialog_api: DialogApiServer, left: int, limit: MailLimit
) -> None:
    dialog_api.dialogs.limits["lady-7", MAN] = left
    assert api.mail_limit("lady-7", MAN).limit is limit


@pytest.mark.parametrize(
    "answer",
    [
        {"messages": [], "mail_limit": {"available": 1, "period": "day"}, "page": 1},
        {"messages": [{**MESSAGE, "text": "…"}], "mail_limit": {"available": 1}},
        {"messages": [{**MESSAGE, "sent_at": "2026-01-31T22:54:00.123456+02:00"}], "mail_limit": {"available": 1}},
        {"messages": [{**MESSAGE, "sent_at": "2026-01-31T22:54:00"}], "mail_limit": {"available": 1}},
        {"messages": [{**MESSAGE, "sender": "lady"}] * 20_000, "mail_limit": {"available": 1}},
    ],
    ids=["unknown fields", "unknown fields of a message", "an offset", "no offset", "a long talk"],
)
def test_what_follows_the_contract_is_an_answer(ask: Callable[[Fault], MailLimitAnswer], answer: object) -> None:
    assert ask(answering(answer)).limit is MailLimit.ALLOWED


@pytest.mark.parametrize(
    ("answer", "place"),
    [
        ({"mail_limit": {"available": 1}}, "messages (missing)"),
        ({"messages": None, "mail_limit": {"available": 1}}, "messages (list_type)"),
        ({"messages": {}, "mail_limit": {"available": 1}}, "messages (list_type)"),
        ({"messages": ["s3cr3t"], "mail_limit": {"available": 1}}, "messages.0 ("),
        ({"messages": [{**MESSAGE, "id": 1}], "mail_limit": {"available": 1}}, "messages.0.id ("),
        ({"messages": [{**MESSAGE, "sender": "s3cr3t"}], "mail_limit": {"available": 1}}, "messages.0.sender ("),
        ({"messages": [{**MESSAGE, "sent_at": "s3cr3t"}], "mail_limit": {"available": 1}}, "messages.0.sent_at ("),
        ({"messages": [{**MESSAGE, "sent_at": "2026-02-30T00:00:00Z"}], "mail_limit": {"available": 1}}, "sent_at ("),
        ({"messages": [{**MESSAGE, "sent_at": "1769900040"}], "mail_limit": {"available": 1}}, "sent_at ("),
        ({"messages": [{**MESSAGE, "sent_at": 1769900040}], "mail_limit": {"available": 1}}, "sent_at ("),
        ({"messages": [], "mail_limit": {"available": -1}}, "mail_limit.available ("),
        ({"messages": [], "mail_limit": {"available": 1.5}}, "mail_limit.available ("),
        ({"messages": [], "mail_limit": {"available": 1.0}}, "mail_limit.available ("),
        ({"messages": [], "mail_limit": {"available": "1"}}, "mail_limit.available ("),
        ({"messages": [], "mail_limit": {"available": True}}, "mail_limit.available ("),
        ({"messages": [], "mail_limit": {"available": None}}, "mail_limit.available ("),
        ({"messages": [], "mail_limit": {}}, "mail_limit.available (missing)"),
        ({"messages": [], "mail_limit": 3}, "mail_limit ("),
        ({"messages": []}, "mail_limit (missing)"),
        ([], "the whole ("),
        (None, "the whole ("),
    ],
)
def test_what_breaks_the_contract_is_unknown_and_says_where(
    ask: Callable[[Fault], MailLimitAnswer], answer: object, place: str
) -> None:
    answered = ask(answering(answer))
    assert (answered.limit, answered.is_outage) == (MailLimit.UNKNOWN, False)
    assert place in answered.reason
    assert "s3cr3t" not in answered.reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "an empty answer"),
        (b"  \r\n", "an empty answer"),
        (b"<html>s3cr3t</html>", "an answer that is no JSON"),
        (b'{"messages": [], "mail_limit": {"available": 1}', "an answer that is no JSON"),
        (b'{"messages": [], "mail_limit": {"available": NaN}}', "an answer against the contract"),
        (b'{"messages": ["\xff"], "mail_limit": {"available": 1}}', "an answer that is no JSON"),
        (b"[" * 100_000, "an answer that is no JSON"),
    ],
)
def test_a_body_that_is_no_json_is_unknown(ask: Callable[[Fault], MailLimitAnswer], body: bytes, reason: str) -> None:
    answered = ask(Fault(body=body))
    assert answered.limit is MailLimit.UNKNOWN
    assert answered.reason.startswith(reason)


@pytest.mark.parametrize("status", [201, 204, 206, 301, 302, 307, 400, 401, 403, 404, 418, 429, 500, 502, 503, 504])
def test_any_status_but_200_is_unknown_whatever_the_body(ask: Callable[[Fault], MailLimitAnswer], status: int) -> None:
    answered = ask(Fault(status=status, headers={"Location": "/dialogs/lady-1/x/messages"}))
    assert answered.limit is MailLimit.UNKNOWN
    assert answered.reason.startswith(f"HTTP {status}")
    assert answered.is_outage is (status in {401, 403, 429, 502, 503, 504})


def test_a_redirect_is_not_followed(ask: Callable[[Fault], MailLimitAnswer], dialog_api: DialogApiServer) -> None:
    with DialogApiServer(DialogsInMemory(), "another token") as elsewhere:
        ask(Fault(status=307, headers={"Location": f"{elsewhere.url}/dialogs/lady-1/{MAN}/messages"}))
        assert (len(dialog_api.asked), elsewhere.asked) == (1, [])


def test_a_wrong_token_is_unknown(connect: Callable[..., HttpDialogApi], dialog_api: DialogApiServer) -> None:
    answered = connect(dialog_api.url, "wrong").mail_limit("lady-1", MAN)
    assert answered == MailLimitAnswer(MailLimit.UNKNOWN, "HTTP 401, the token is not accepted", is_outage=True)


def ask_at_once(
    api: HttpDialogApi, dialog_api: DialogApiServer, faults: Mapping[str, Fault]
) -> dict[str, MailLimitAnswer]:
    """Asks for a dialog of its own with each fault, all at the same time."""
    dialogs = {name: DialogId(f"lady-{name.replace(' ', '-')}", new_ulid()) for name in faults}
    for name, fault in faults.items():
        dialog_api.misbehave(fault, dialog=dialogs[name])
    bounds = StageBounds(concurrency=len(faults), deadline=timedelta(seconds=60), outages=99, unknown=99)
    answers = ask_all(api, dialogs.values(), bounds, logging.getLogger("pin_jobs_tests"))
    return {name: answers[dialog] for name, dialog in dialogs.items()}


def test_a_request_takes_no_longer_than_its_timeout_however_the_answer_comes(
    connect: Callable[..., HttpDialogApi], dialog_api: DialogApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    begun = time.monotonic()
    answers = ask_at_once(connect(dialog_api.url, timeout=timedelta(seconds=0.5)), dialog_api, LATE)
    assert time.monotonic() - begun < 10
    late = MailLimitAnswer(MailLimit.UNKNOWN, "no answer within 0.5 s", is_outage=True)
    assert answers == dict.fromkeys(LATE, late)
    assert "the dialog API left 5 of 5 dialogs unknown: 5 x no answer within 0.5 s" in caplog.messages
    _assert_says_nothing(caplog, dialog_api)


def test_no_answer_that_the_sandbox_knows_to_be_wrong_is_anything_but_unknown(
    api: HttpDialogApi, dialog_api: DialogApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answers = ask_at_once(api, dialog_api, PROMPT)
    assert {answer.limit for answer in answers.values()} == {MailLimit.UNKNOWN}
    # None of them for want of time.
    assert not [name for name, answer in answers.items() if answer.reason.startswith("no ")]
    assert {name: answers[name].paused_for for name in ("429", "503", "500")} == {
        "429": timedelta(seconds=30),
        "503": timedelta(seconds=30),
        "500": None,
    }
    _assert_says_nothing(caplog, dialog_api)


def _assert_says_nothing(caplog: pytest.LogCaptureFixture, server: DialogApiServer) -> None:
    """Neither the token nor the address, at any level, by any library."""
    assert any("dialogs unknown: " in message for message in caplog.messages)
    assert DIALOG_API_TOKEN not in caplog.text
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("pin_jobs")]
    assert not any(server.url.removeprefix("http://") in message for message in ours)


@pytest.mark.parametrize(
    "fault",
    [
        FAULTS["huge"],
        Fault(headers={"Transfer-Encoding": "chunked"}, body=b"10000\r\n" + b" " * 65536 + b"\r\n", repeated=800),
    ],
    ids=["announced", "in chunks"],
)
def test_of_a_body_of_50_mb_only_a_small_part_is_read(
    ask: Callable[[Fault], MailLimitAnswer], dialog_api: DialogApiServer, fault: Fault
) -> None:
    assert fault.body is not None
    assert len(fault.body) * fault.repeated > 50_000_000
    assert ask(fault).reason == f"an answer of more than {MAX_BYTES} bytes"
    # What the two ends of a socket buffer comes on top.
    assert dialog_api.bytes_sent < 25_000_000


def test_the_largest_answer_that_is_read_may_be_chosen(
    connect: Callable[..., HttpDialogApi], dialog_api: DialogApiServer
) -> None:
    body = b'{"messages": [], "mail_limit": {"available": 1}}'
    for room, limit in ((len(body), MailLimit.ALLOWED), (len(body) - 1, MailLimit.UNKNOWN)):
        dialog_api.misbehave(Fault(body=body), times=1)
        assert connect(dialog_api.url, max_bytes=room).mail_limit("lady-1", MAN).limit is limit


@pytest.mark.parametrize(
    "lady", ["lady-a/b", "lady-?x=1#y", "lady-%2F", "lady-../..", "lady- й\n\x00", "lady-;,@:&=+$"]
)
def test_an_id_is_one_segment_of_the_path_whatever_it_holds(
    api: HttpDialogApi, dialog_api: DialogApiServer, lady: str
) -> None:
    assert api.mail_limit(lady, MAN).limit is MailLimit.ALLOWED
    assert dialog_api.asked == [(lady, MAN)]


@pytest.mark.parametrize("lady", ["", ".", "..", "\ud800"])
def test_an_id_that_cannot_be_a_segment_is_not_asked_for(
    api: HttpDialogApi, dialog_api: DialogApiServer, lady: str
) -> None:
    assert api.mail_limit(lady, MAN).limit is MailLimit.UNKNOWN
    assert api.mail_limit("lady-1", lady).limit is MailLimit.UNKNOWN
    assert dialog_api.asked == []


def test_a_path_in_the_url_is_kept(connect: Callable[..., HttpDialogApi]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        api = connect(f"http://127.0.0.1:{listener.getsockname()[1]}/api/v2/")
        thread = threading.Thread(target=api.mail_limit, args=("lady-1", MAN))
        thread.start()
        connection, _ = listener.accept()
        with connection:
            request = connection.recv(65536).decode()
        thread.join(5)
    lines = request.split("\r\n")
    assert lines[0] == f"GET /api/v2/dialogs/lady-1/{MAN}/messages HTTP/1.1"
    assert f"Authorization: Bearer {DIALOG_API_TOKEN}" in lines
    assert "Accept-Encoding: identity" in lines


def test_the_environment_sends_the_token_nowhere_else(
    api: HttpDialogApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password else")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    assert api.mail_limit("lady-1", MAN).limit is MailLimit.ALLOWED


class TestTheConnection:
    def test_that_is_refused_is_an_outage_without_an_address(self, connect: Callable[..., HttpDialogApi]) -> None:
        answered = connect(f"http://127.0.0.1:{_closed_port()}").mail_limit("lady-1", MAN)
        expected = MailLimitAnswer(MailLimit.UNKNOWN, "cannot be reached (Connection refused)", is_outage=True)
        assert answered == expected

    def test_to_a_host_that_is_not_there_is_an_outage(self, connect: Callable[..., HttpDialogApi]) -> None:
        answered = connect("http://nowhere.invalid").mail_limit("lady-1", MAN)
        assert answered.is_outage
        assert "nowhere" not in answered.reason

    def test_that_could_not_be_made_is_tried_once_more(
        self, api: HttpDialogApi, dialog_api: DialogApiServer, network: list[Exception]
    ) -> None:
        network.append(httpx.ConnectError("on purpose"))
        assert api.mail_limit("lady-1", MAN).limit is MailLimit.ALLOWED
        network += [httpx.ConnectError("on purpose"), httpx.ConnectError("on purpose")]
        assert api.mail_limit("lady-1", MAN).reason == "cannot be reached"
        assert len(dialog_api.asked) == 1

    def test_that_breaks_once_the_request_may_have_arrived_is_not(
        self, ask: Callable[[Fault], MailLimitAnswer], dialog_api: DialogApiServer
    ) -> None:
        answered = ask(FAULTS["hangup"])
        assert answered.is_outage
        assert answered.reason.startswith("the connection broke off")
        assert len(dialog_api.asked) == 1

    def test_is_kept_for_the_next_request(self, api: HttpDialogApi, dialog_api: DialogApiServer) -> None:
        for _ in range(20):
            assert api.mail_limit("lady-1", MAN).limit is MailLimit.ALLOWED
        assert dialog_api.connections == 1

    def test_that_the_server_closed_meanwhile_is_replaced(
        self, connect: Callable[..., HttpDialogApi], dialog_api: DialogApiServer
    ) -> None:
        api = connect(dialog_api.url)
        for _ in range(3):
            dialog_api.misbehave(Fault(headers={"Connection": "close"}), times=1)
            assert api.mail_limit("lady-1", MAN).limit is MailLimit.ALLOWED


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What the next connections end with, before they reach anybody."""
    faults: list[Exception] = []
    original = httpx.AsyncHTTPTransport.handle_async_request

    async def handle(self: Any, request: httpx.Request) -> httpx.Response:
        if faults:
            raise faults.pop(0)
        return await original(self, request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
    return faults


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


class TestTls:
    @pytest.fixture
    def server(self, authority: trustme.CA) -> Iterator[DialogApiServer]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        with DialogApiServer(DialogsInMemory(), DIALOG_API_TOKEN, tls=context) as server:
            yield server

    def test_with_an_authority_that_the_host_trusts(
        self,
        server: DialogApiServer,
        authority: trustme.CA,
        connect: Callable[..., HttpDialogApi],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        with authority.cert_pem.tempfile() as file:
            monkeypatch.setenv("SSL_CERT_FILE", file)
            assert connect(server.url).mail_limit("lady-1", MAN).limit is MailLimit.ALLOWED

    def test_with_another_one_sends_nothing(
        self, server: DialogApiServer, connect: Callable[..., HttpDialogApi]
    ) -> None:
        answered = connect(server.url).mail_limit("lady-1", MAN)
        expected = MailLimitAnswer(MailLimit.UNKNOWN, "TLS failed (CERTIFICATE_VERIFY_FAILED)", is_outage=True)
        assert (answered, server.asked, server.connections) == (expected, [], 1)

    def test_to_a_server_that_speaks_none(
        self, dialog_api: DialogApiServer, connect: Callable[..., HttpDialogApi]
    ) -> None:
        answered = connect(dialog_api.url.replace("http://", "https://")).mail_limit("lady-1", MAN)
        assert answered.reason.startswith("TLS failed")
        assert answered.is_outage


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"",
        b"\x00" * 1000,
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n123456",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: \xff\xfe\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 999999 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n{}",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50_000 + b"\r\n{}",
        b"HTTP/2.0 200 OK\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 429 No\r\nRetry-After: " + b"9" * 5000 + b"\r\nDate: never\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_a_server_that_speaks_no_proper_http_is_unknown_and_raises_nothing(
    connect: Callable[..., HttpDialogApi], bytes_sent: bytes
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)

        def serve() -> None:
            with suppress(OSError), listener.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(bytes_sent)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        answered = connect(f"http://127.0.0.1:{listener.getsockname()[1]}").mail_limit("lady-1", MAN)
        thread.join(5)
    assert answered.limit is MailLimit.UNKNOWN
    assert DIALOG_API_TOKEN not in answered.reason
    assert len(answered.reason) < 100


class TestClosing:
    def test_breaks_off_what_is_under_way(
        self, dialog_api: DialogApiServer, connect: Callable[..., HttpDialogApi]
    ) -> None:
        api = connect(dialog_api.url, timeout=timedelta(seconds=60))
        dialog_api.misbehave(FAULTS["hang"])
        answers: list[MailLimitAnswer] = []
        asking = [
            threading.Thread(target=lambda: answers.append(api.mail_limit("lady-1", new_ulid()))) for _ in range(3)
        ]
        for thread in asking:
            thread.start()
        wait_for(lambda: len(dialog_api.asked) == 3, 10, "the requests to arrive")
        begun = time.monotonic()
        api.close()
        for thread in asking:
            thread.join(10)
        assert time.monotonic() - begun < 5
        assert answers == [MailLimitAnswer(MailLimit.UNKNOWN, "broken off")] * 3

    def test_is_for_good_and_may_be_repeated(self, dialog_api: DialogApiServer) -> None:
        with HttpDialogApi(dialog_api.url, DIALOG_API_TOKEN) as api:
            assert api.mail_limit("lady-1", MAN).limit is MailLimit.ALLOWED
        api.close()
        assert api.mail_limit("lady-1", MAN).reason == "broken off"
        assert not any(thread.name == "dialog API loop" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("value", "date", "seconds"),
    [
        ("30", None, 30),
        (" 30 ", None, 30),
        ("0", None, 0),
        ("9" * 5000, None, 365 * 86400),
        ("99999999", None, 365 * 86400),
        ("Sat, 31 Jan 2026 22:59:30 GMT", None, 30),
        ("Sat, 31 Jan 2026 22:58:30 GMT", None, 0),
        # Whose clock is an hour ahead of ours.
        ("Sun, 01 Feb 2026 00:00:00 GMT", "Sat, 31 Jan 2026 23:59:00 GMT", 60),
        ("Sunday, 01-Feb-26 00:00:00 GMT", "Sat, 31 Jan 2026 23:59:00 GMT", 60),
        ("Sat, 31 Jan 9999 00:00:00 GMT", None, 365 * 86400),
        ("Sat, 31 Jan 2026 22:59:30 GMT", "yesterday", 30),
        ("", None, None),
        (None, None, None),
        ("-5", None, None),
        ("1.5", None, None),
        ("soon", None, None),
        ("Sat, 99 Jan 2026 22:59:30 GMT", None, None),
        ("30, 60", None, None),
    ],
)
def test_retry_after_is_read_in_both_forms(value: str | None, date: str | None, seconds: float | None) -> None:
    headers = {name: text for name, text in (("Retry-After", value), ("Date", date)) if text is not None}
    expected = None if seconds is None else timedelta(seconds=seconds)
    assert retry_after(httpx.Headers(headers), datetime(2026, 1, 31, 22, 59, tzinfo=UTC)) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "s3cr3t",
        "ftp://s3cr3t",
        "http://",
        "https://u:s3cr3t@host",
        "https://s3cr3t@host",
        "https://host/?key=s3cr3t",
        "https://host/#s3cr3t",
        "http://s3cr3t:99999",
        "http://s3cr3t:0",
        "http://[s3cr3t",
        "http://s3cr3t\x00",
    ],
)
def test_a_url_that_cannot_be_used_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(InvalidDialogApi) as error:
        HttpDialogApi(url, "token")
    assert "s3cr3t" not in repr(error.value)
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__ or error.value.__context__ is None


@pytest.mark.parametrize("token", ["", "  ", "s3cr3t\r\nX: y", "s3cr3t s3cr3t", "s3cr3t\x00", "s3cr3tй"])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(InvalidDialogApi) as error:
        HttpDialogApi("http://host", token)
    assert "s3cr3t" not in repr(error.value)


def test_a_token_may_end_in_a_newline_as_files_do(
    dialog_api: DialogApiServer, connect: Callable[..., HttpDialogApi]
) -> None:
    assert connect(dialog_api.url, f"{DIALOG_API_TOKEN}\n").mail_limit("lady-1", MAN).limit is MailLimit.ALLOWED


def test_a_client_shows_neither_token_nor_address(api: HttpDialogApi, dialog_api: DialogApiServer) -> None:
    assert DIALOG_API_TOKEN not in repr(api)
    assert dialog_api.url not in repr(api)


def _closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
