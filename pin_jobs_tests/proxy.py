"""A network between client and server that fails when it is told to."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto

from sqlalchemy import make_url

# How the driver sends it, whichever of the two protocols it uses.
COMMIT = b"COMMIT\x00"


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


def _close(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
