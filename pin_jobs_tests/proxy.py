"""A network between client and server that fails when it is told to."""

import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum, auto
from typing import BinaryIO, Final

from sqlalchemy import make_url

# How the driver sends it, whichever of the two protocols it uses.
COMMIT = b"COMMIT\x00"
_CANCEL_REQUEST: Final = 80_877_102
_READY_FOR_QUERY: Final = re.compile(rb"Z\x00\x00\x00\x05[ITE]$")
_ASKS_FOR_A_PASSWORD: Final = re.compile(rb"R\x00\x00\x00.\x00\x00\x00[\x03\x05\x0a\x0b]", re.DOTALL)
# For how long a network may be held up before a test must have hung.
_PATIENCE: Final = 120.0


class Cut(Enum):
    """Where the connection breaks."""

    BEFORE_COMMIT = auto()
    """The server never sees COMMIT."""
    AFTER_COMMIT = auto()
    """The server has committed; its answer never arrives."""
    AROUND_COMMIT = auto()
    """The client is cut off at once, the server sees COMMIT only after the client has come back to ask."""
    ANSWER_TO_COMMIT = auto()
    """The server has committed; its answer is under way for ever."""


class Proxy:
    """Passes TCP connections on to a server, and cuts the first one that commits as `cut` says."""

    def __init__(
        self,
        url: str,
        *,
        cut: Cut | None = None,
        down_after_cut: bool = False,
        when_cut: Callable[[], None] = lambda: None,
    ) -> None:
        self._server = make_url(url)
        self._cut = cut
        self._down_after_cut = down_after_cut
        self._when_cut = when_cut
        self._victim: socket.socket | None = None
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._came_back = threading.Event()
        self._was_cut = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        url_here = self._server.set(host="127.0.0.1", port=port, query={}, username=self._server.username or "postgres")
        self.url = url_here.render_as_string(hide_password=False)

    def __enter__(self) -> "Proxy":
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Break all connections and take no more."""
        self._came_back.set()
        _close(self._listener)
        for end in self._open:
            _close(end)
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._was_cut:
                    self._came_back.set()
                server = self._connect()
                self._open += [client, server]
                self._start(self._pass_to_server, client, server)
                self._start(self._pass_to_client, server, client)

    def _connect(self) -> socket.socket:
        host = str(self._server.query.get("host") or self._server.host or "127.0.0.1")
        port = self._server.port or 5432
        if not host.startswith("/"):
            return socket.create_connection((host, port))
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{host}/.s.PGSQL.{port}")
        return server

    def _pass_to_server(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                if self._cut and not self._was_cut and COMMIT in data:
                    self._cut_off(client, server, data)
                    return
                server.sendall(data)
        _close(server)

    def _pass_to_client(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                if client is not self._victim:
                    client.sendall(data)
                elif self._cut is Cut.AFTER_COMMIT:
                    break
                elif self._cut is Cut.ANSWER_TO_COMMIT:
                    self._when_cut()
        _close(client)

    def _cut_off(self, client: socket.socket, server: socket.socket, commit: bytes) -> None:
        self._victim = client
        self._was_cut = True
        if self._down_after_cut:
            _close(self._listener)
        match self._cut:
            case Cut.BEFORE_COMMIT:
                _close(client)
                _close(server)
            case Cut.AFTER_COMMIT | Cut.ANSWER_TO_COMMIT:
                # What becomes of the answer is up to _pass_to_client.
                server.sendall(commit)
            case Cut.AROUND_COMMIT:
                _close(client)
                self._came_back.wait(5)
                # Long enough for the first question to find the transaction in progress.
                threading.Event().wait(0.3)
                server.sendall(commit)
                server.recv(65536)
                _close(server)


class Side(Enum):
    """Where a request is held up: on its way to the server, or on its answer's way back."""

    BEFORE = "before"
    AFTER = "after"


class Breakpoint(Proxy):
    """Passes connections on, notes each request down, and holds one of them up: at a request, by number or first words.

    A request is what the server answers as one: connecting, a statement, BEGIN, COMMIT; and the client's good-bye,
    which it does not answer. Meanwhile both ends believe in a connection on which the other one is silent.
    """

    def __init__(self, url: str, request: int | str | None = None, side: Side = Side.BEFORE) -> None:
        super().__init__(url)
        self.requests: list[str] = []
        self.reached = threading.Event()
        self._request = request
        self._side = side
        self._answer_is_due = threading.Event()
        self._go_on = threading.Event()
        self._client, self._server_end, self._held_up = None, None, b""
        # In plain text from the first byte on.
        plain = {"sslmode": "disable", "gssencmode": "disable"}
        self.url = make_url(self.url).update_query_dict(plain).render_as_string(hide_password=False)

    def __exit__(self, *error: object) -> None:
        self._go_on.set()
        super().__exit__(*error)

    def hold_up(self) -> None:
        """From now on nothing arrives on the connection of the last request, in either direction."""
        self.reached.set()

    def go_on(self) -> None:
        """What was held up arrives, however late."""
        self._go_on.set()

    def hang_up(self, *, deliver: bool = False) -> None:
        """Close the connection on both sides; what was held up is lost, unless the request is to be delivered still."""
        assert self._client is not None
        assert self._server_end is not None
        if deliver:
            with suppress(OSError):
                self._server_end.sendall(self._held_up)
        _close(self._client)
        _close(self._server_end)
        self._go_on.set()

    def _pass_to_server(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError), client.makefile("rb") as stream:
            for name, data in _requests(stream):
                if name and not self.reached.is_set():
                    self._client, self._server_end, self._held_up = client, server, data
                    self.requests.append(name)
                    if self._is_chosen(name):
                        if self._side is Side.AFTER:
                            self._answer_is_due.set()
                        else:
                            self.hold_up()
                self._wait_while_held_up(client)
                server.sendall(data)
        _close(server)

    def _pass_to_client(self, server: socket.socket, client: socket.socket) -> None:
        answer = b""
        with suppress(OSError):
            while data := server.recv(65536):
                if self._answer_is_due.is_set() and not _ASKS_FOR_A_PASSWORD.match(data):
                    answer += data
                    if not _READY_FOR_QUERY.search(answer):
                        continue
                    data, answer = answer, b""
                    self._answer_is_due.clear()
                    self.hold_up()
                self._wait_while_held_up(client)
                client.sendall(data)
        self._wait_while_held_up(client)
        _close(client)

    def _is_chosen(self, name: str) -> bool:
        if isinstance(self._request, str):
            return name.startswith(self._request)
        return len(self.requests) - 1 == self._request

    def _wait_while_held_up(self, client: socket.socket) -> None:
        if self.reached.is_set() and client is self._client:
            assert self._go_on.wait(_PATIENCE), "nobody let the network go on"


def _requests(stream: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """What a client sends, cut after each request, named by the first words of its SQL; without a name: no request."""
    head = stream.read(8)
    if len(head) == 8:
        length, code = struct.unpack("!II", head)
        yield "" if code == _CANCEL_REQUEST else "connect", head + stream.read(length - 8)
    name, data = "", b""
    while head := stream.read(5):
        kind, length = struct.unpack("!cI", head)
        body = stream.read(length - 4)
        data += head + body
        if kind in {b"Q", b"P"}:
            # Parse has the name of the statement, empty for ours, before its text.
            name = " ".join(body.strip(b"\x00").split(b"\x00")[0].decode().split())
        elif kind == b"X":
            name = "good-bye"
        # Query, Sync and Terminate end a request; a password and Flush are answered without being one.
        if kind in {b"Q", b"S", b"X", b"p", b"H"}:
            yield name, data
            name, data = "", b""


def _close(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
