"""A dialog API that follows docs/dialog-api.openapi.yaml: `python -m pin_jobs.sandbox.dialog_api --port 3100`.

It serves what the chathouse's database at CHATHOUSE_DATABASE_URL says, to whoever has the token DIALOG_API_TOKEN, and
misbehaves on demand:

    curl http://127.0.0.1:3100/sandbox/faults                           # which there are, and which one is on
    curl -X POST 'http://127.0.0.1:3100/sandbox/faults/500?times=20'    # without times: until it is taken away
    curl -X DELETE http://127.0.0.1:3100/sandbox/faults
"""

import gzip
import hmac
import json
import os
import random
import re
import signal
import ssl
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self
from urllib.parse import parse_qs, unquote, urlsplit

import click
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from pin_jobs.database import connect_to, parse_database_url
from pin_jobs.errors import PinJobsError
from pin_jobs.queries import load_queries

_QUERIES: Final = {
    name: text(query) for name, query in load_queries(Path(__file__).with_name("dialog_api.sql")).items()
}
_DIALOG: Final = re.compile(r"/dialogs/([^/]+)/([^/]+)/messages")
_ULID: Final = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")
_FAULTS_PATH: Final = "/sandbox/faults"
# Seconds that an answer takes, at least and at most, in `pin-jobs dev`.
_LATENCY: Final = (0.02, 0.3)


@dataclass(frozen=True, slots=True)
class Dialog:
    """What the API knows of a dialog."""

    available: int
    messages: tuple[Mapping[str, str], ...] = ()


class Dialogs(Protocol):
    """Where the server looks dialogs up."""

    def find(self, lady_api_id: str, man_ulid: str) -> Dialog | None:
        """The dialog, or `None` if there is none."""
        ...


class DialogsInMemory:
    """Every dialog of a lady whose id begins with `lady-`: two messages, and three mails left or what `limits` says."""

    def __init__(self) -> None:
        self.limits: dict[tuple[str, str], int] = {}

    def find(self, lady_api_id: str, man_ulid: str) -> Dialog | None:
        """The dialog, or `None` if there is none."""
        if not lady_api_id.startswith("lady-"):
            return None
        messages = (
            {"id": "501", "sender": "man", "sent_at": "2026-01-31T22:54:00.120Z"},
            {"id": "502", "sender": "lady", "sent_at": "2026-01-31T22:55:10Z"},
        )
        return Dialog(self.limits.get((lady_api_id, man_ulid), 3), messages)


class DialogsInDatabase:
    """The dialogs of the sandbox's chathouse; mails that were sent use their limits up."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def find(self, lady_api_id: str, man_ulid: str) -> Dialog | None:
        """The dialog, or `None` if there is none."""
        with self._engine.connect() as connection:
            parameters = {"lady_api_id": lady_api_id, "man_ulid": man_ulid}
            row = connection.execute(_QUERIES["find_dialog"], parameters).one_or_none()
        return None if row is None else Dialog(row.available, tuple(row.messages))


@dataclass(frozen=True, slots=True)
class Fault:
    """What the server does in place of, or to, its answer.

    `status` and `body` stand in for the true ones, the body so often `repeated`. `delay`: seconds before the answer;
    `drip`: seconds after each byte, of the body alone unless `drips_head`; `hangs_up`: no answer at all.
    """

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    repeated: int = 1
    delay: float = 0
    drip: float = 0
    drips_head: bool = False
    hangs_up: bool = False


_ERROR: Final = b'{"error": "on demand"}'
_HTML: Final = {"Content-Type": "text/html; charset=utf-8"}
FAULTS: Final[Mapping[str, Fault]] = {
    "429": Fault(429, {"Retry-After": "30"}, _ERROR),
    "500": Fault(500, body=_ERROR),
    "503": Fault(503, {"Retry-After": "30"}, _ERROR),
    "401": Fault(401, {"WWW-Authenticate": "Bearer"}, _ERROR),
    "html": Fault(200, _HTML, b"<html><body>Back soon</body></html>"),
    "empty": Fault(200, body=b""),
    "huge": Fault(200, body=b"[0," * 1_000, repeated=17_000),
    "bomb": Fault(200, {"Content-Encoding": "gzip"}, gzip.compress(b" " * 50_000_000)),
    "redirect": Fault(302, {"Location": "/elsewhere"}, b""),
    "contract": Fault(200, body=b'{"messages": [], "mail_limit": {"available": "3"}}'),
    "slow": Fault(delay=5),
    "hang": Fault(delay=600),
    "drip": Fault(drip=0.5),
    "hangup": Fault(hangs_up=True),
}
"""By the names that people give them."""


class DialogApiServer:
    """The server, in threads of this process, on `port` of 127.0.0.1 (0: a free one). A context manager.

    `latency`: between which seconds each answer takes its time.
    """

    def __init__(
        self,
        dialogs: Dialogs,
        token: str,
        *,
        port: int = 0,
        latency: tuple[float, float] = (0.0, 0.0),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.dialogs = dialogs
        self.token = token
        self._scheme = "https" if tls else "http"
        self._latency = latency
        self._lock = threading.Lock()
        self._fault: tuple[Fault, float] | None = None
        self._faults_of: dict[tuple[str, str], Fault] = {}
        self._under_way: list[tuple[str, str]] = []
        self._stopping = threading.Event()
        self._server = _Server(("127.0.0.1", port), partial(_Handler, self))
        if tls:
            # The handshake is for the thread of the connection: the one that accepts would wait for it.
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.asked: list[tuple[str, str]] = []
        """The dialogs that were asked for, in order of arrival."""
        self.most_at_once = 0
        """Requests under way at the same moment, at most."""
        self.overlapping: set[tuple[str, str]] = set()
        """Dialogs that were asked for while they were being asked for."""
        self.bytes_sent = 0
        """Of bodies, as far as they were taken."""
        self.connections = 0

    @property
    def url(self) -> str:
        """What DIALOG_API_URL is to be."""
        return f"{self._scheme}://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()

    def misbehave(self, fault: Fault, *, times: float = float("inf"), dialog: tuple[str, str] | None = None) -> None:
        """From now on, so many times; or for ever for one dialog."""
        with self._lock:
            if dialog is not None:
                self._faults_of[dialog] = fault
            else:
                self._fault = (fault, times)

    def behave(self) -> None:
        """No faults any more."""
        with self._lock:
            self._fault = None
            self._faults_of.clear()

    def fault_in_words(self) -> str:
        """The name of the fault that is on, for people."""
        with self._lock:
            names = (name for name, fault in FAULTS.items() if self._fault and self._fault[0] is fault)
            return next(names, "none")

    def is_authorized(self, header: str | None) -> bool:
        """Whether it is the token."""
        return hmac.compare_digest((header or "").encode(), f"Bearer {self.token}".encode())

    def answer(self, dialog: tuple[str, str]) -> tuple[Fault, int, Mapping[str, Any]]:
        """The fault to play (one without effect, if there is none), and the true answer: its status and its body."""
        fault = self._begin(dialog)
        try:
            self.goes_on_after(fault.delay + random.uniform(*self._latency))  # noqa: S311  # latency needs no secrecy
            return fault, *self._look_up(dialog)
        finally:
            with self._lock:
                self._under_way.remove(dialog)

    def goes_on_after(self, seconds: float) -> bool:
        """Wait, unless the server is being stopped."""
        return not self._stopping.wait(seconds)

    def _begin(self, dialog: tuple[str, str]) -> Fault:
        with self._lock:
            self.asked.append(dialog)
            if dialog in self._under_way:
                self.overlapping.add(dialog)
            self._under_way.append(dialog)
            self.most_at_once = max(self.most_at_once, len(self._under_way))
            if dialog in self._faults_of:
                return self._faults_of[dialog]
            if self._fault is None:
                return Fault()
            fault, left = self._fault
            self._fault = (fault, left - 1) if left > 1 else None
            return fault

    def _look_up(self, dialog: tuple[str, str]) -> tuple[int, Mapping[str, Any]]:
        try:
            found = self.dialogs.find(*dialog) if _ULID.fullmatch(dialog[1]) else None
        except DBAPIError:
            return 500, {"error": "the database does not answer"}
        if found is None:
            return 404, {"error": "there is no such dialog"}
        return 200, {"messages": list(found.messages), "mail_limit": {"available": found.available}}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that has had enough of an answer is none of our errors.
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    # Else a small answer waits for the acknowledgement of its head.
    disable_nagle_algorithm = True

    def __init__(self, api: DialogApiServer, *arguments: Any) -> None:
        self._api = api
        api.connections += 1
        super().__init__(*arguments)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == _FAULTS_PATH:
            self._send(200, {"on": self._api.fault_in_words(), "known": list(FAULTS)})
        elif match := _DIALOG.fullmatch(url.path):
            self._show_dialog((unquote(match[1]), unquote(match[2])))
        else:
            self._send(404, {"error": "there is no such page"})

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        folder, _, name = url.path.rpartition("/")
        times = parse_qs(url.query).get("times", ["inf"])[0]
        if folder != _FAULTS_PATH:
            self._refuse_method()
        elif name not in FAULTS or not re.fullmatch(r"[1-9][0-9]{0,8}|inf", times):
            self._send(404, {"error": f"known faults are {', '.join(FAULTS)}; times is a number"})
        else:
            self._api.misbehave(FAULTS[name], times=float(times))
            self._send(200, {"on": name, "times": times})

    def do_DELETE(self) -> None:
        if urlsplit(self.path).path == _FAULTS_PATH:
            self._api.behave()
            self._send(200, {"on": "none"})
        else:
            self._refuse_method()

    def _refuse_method(self) -> None:
        # What its body holds would be taken for the next request.
        self.close_connection = True
        self._send(405, {"error": "only GET"}, {"Allow": "GET"})

    def __getattr__(self, name: str) -> Callable[[], None]:
        # Every other method.
        if name.startswith("do_"):
            return self._refuse_method
        raise AttributeError(name)

    def _show_dialog(self, dialog: tuple[str, str]) -> None:
        if not self._api.is_authorized(self.headers["Authorization"]):
            self._send(401, {"error": "the token is missing or not accepted"}, {"WWW-Authenticate": "Bearer"})
            return
        fault, status, answer = self._api.answer(dialog)
        if fault.hangs_up:
            self.close_connection = True
        else:
            self._play(fault, status, json.dumps(answer).encode())

    def _send(self, status: int, answer: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        self._play(Fault(headers=headers or {}), status, json.dumps(answer).encode())

    def _play(self, fault: Fault, true_status: int, true_body: bytes) -> None:
        body = true_body if fault.body is None else fault.body
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body) * fault.repeated)}
        if "Transfer-Encoding" in fault.headers:
            del headers["Content-Length"]
        head = self._head(fault.status or true_status, {**headers, **fault.headers})
        self._write(head, fault.drip if fault.drips_head else 0)
        for _ in range(fault.repeated if self.command != "HEAD" else 0):
            self._write(body, fault.drip)
            self._api.bytes_sent += len(body)

    def _head(self, status: int, headers: Mapping[str, str]) -> bytes:
        lines = [f"HTTP/1.1 {status} {self.responses.get(status, ('',))[0]}", f"Date: {self.date_time_string()}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if self.close_connection:
            lines.append("Connection: close")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def _write(self, data: bytes, drip: float) -> None:
        if not drip:
            self.wfile.write(data)
            return
        for byte in data:
            self.wfile.write(bytes([byte]))
            if not self._api.goes_on_after(drip):
                self.close_connection = True
                return

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002  # the base class's name
        """Say nothing: a line for each request is more than anybody reads."""


@click.command()
@click.option("--port", required=True, type=click.IntRange(1, 65535))
def main(port: int) -> None:
    """Serve the sandbox's dialogs until SIGTERM or SIGINT."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    variable = "CHATHOUSE_DATABASE_URL"
    try:
        url = parse_database_url(os.environ.get(variable, ""), variable=variable)
        dialogs = DialogsInDatabase(connect_to(url, application_name="pin-jobs dialog API"))
        with DialogApiServer(dialogs, os.environ.get("DIALOG_API_TOKEN", ""), port=port, latency=_LATENCY):
            # With a timeout, since a signal's handler does not wake up who waits without one.
            while not stopped.wait(0.2):
                pass
    except (PinJobsError, OSError) as error:
        raise SystemExit(f"dialog API: {error}") from None


if __name__ == "__main__":
    main()
