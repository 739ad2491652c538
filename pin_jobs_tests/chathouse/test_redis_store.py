"""The marks and the operators' stores in a real Valkey, and in ones that fail."""

import json
import logging
import os
import signal
import socket
import ssl
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import trustme
from redis import Redis

from pin_jobs.chathouse.redis_client import InvalidRedisUrl, connect_to_redis
from pin_jobs.chathouse.redis_store import (
    OperatorStore,
    RedisStore,
    Refill,
    StoredTask,
    forgotten_key,
    store_key,
)
from pin_jobs.sandbox.processes import processes_in
from pin_jobs.sandbox.servers import EmbeddedValkey
from pin_jobs_tests.chathouse.factories_chathouse import Dialog, Lady, new_ulid

LOG = logging.getLogger("pin_jobs_tests")
PASSWORD = "s3cr3t-of-redis"
LADY = Lady(1042, "lady-1042", new_ulid(), "operator-1")


def a_pair() -> Dialog:
    return Dialog(LADY, new_ulid())


def a_task(operator_id: str = "operator-1", **values: Any) -> StoredTask:
    moment = datetime(2026, 1, 31, 22, 54, 0, 120_999, tzinfo=UTC)
    defaults = {
        "id": uuid.uuid4(),
        "kind": "NeedToWriteMailTask",
        "module": "postChatMail",
        "operator_id": operator_id,
        "lady_db_id": 1042,
        "man_ulid": "01HZX3V7Q8R2M4N6P8S0T2W4Y6",
        "event_at": moment,
        "event_trigger": "2026-01-31T22:54:00.120Z",
        "status": "active",
        "created_at": moment + timedelta(minutes=11),
    }
    return StoredTask(**{**defaults, **values})


@pytest.fixture
def store(valkey: Redis, valkey_url: str) -> Iterator[RedisStore]:
    assert valkey.dbsize() == 0
    with connect_to_redis(valkey_url) as client:
        yield RedisStore(client, LOG)


@pytest.fixture
def heard(valkey: Redis) -> Iterator[Callable[[str], list[Any]]]:
    """What was told on an operator's channel since it was first asked for."""
    subscriptions: dict[str, Any] = {}

    def told(operator_id: str) -> list[Any]:
        if operator_id not in subscriptions:
            subscriptions[operator_id] = valkey.pubsub()
            subscriptions[operator_id].subscribe(store_key(operator_id))
            assert subscriptions[operator_id].get_message(timeout=5)["type"] == "subscribe"
        messages = []
        while (message := subscriptions[operator_id].get_message(timeout=0.05)) is not None:
            messages.append(json.loads(message["data"]))
        return messages

    yield told
    for subscription in subscriptions.values():
        subscription.close()


class TestMarks:
    def test_are_kept_under_the_key_that_the_chathouse_knows(self, store: RedisStore, valkey: Redis) -> None:
        pair = a_pair()
        assert store.forget([pair])
        assert valkey.keys() == [f"chathouse:checkPostChatMailDialog:1042_{pair.man_ulid}"]

    def test_say_which_pairs_are_forgotten(self, store: RedisStore) -> None:
        pairs = [a_pair() for _ in range(100)]
        assert store.forget(pairs[::2])
        assert store.forgotten(pairs) == {pair: number % 2 == 0 for number, pair in enumerate(pairs)}

    def test_that_somebody_else_has_set_count_too(self, store: RedisStore, valkey: Redis) -> None:
        pair = a_pair()
        valkey.set(forgotten_key(pair), "")
        assert store.forgotten([pair]) == {pair: True}

    def test_end_after_ten_minutes_by_the_server_s_clock(self, store: RedisStore, valkey: Redis) -> None:
        pair = a_pair()
        store.forget([pair])
        assert 590 < valkey.ttl(forgotten_key(pair)) <= 600

    def test_may_live_shorter_and_are_gone_then(self, store: RedisStore, valkey: Redis) -> None:
        pair = a_pair()
        store.forget([pair], ttl=timedelta(minutes=1))
        assert 50 < valkey.ttl(forgotten_key(pair)) <= 60
        valkey.pexpire(forgotten_key(pair), 0)
        assert store.forgotten([pair]) == {pair: False}

    def test_are_read_in_one_command_and_written_in_one_round_trip(self, store: RedisStore, valkey: Redis) -> None:
        pairs = [a_pair() for _ in range(1000)]
        before = valkey.info("commandstats").get("cmdstat_mget", {"calls": 0})["calls"]
        begun = time.monotonic()
        assert store.forget(pairs)
        assert all(store.forgotten(pairs).values())
        assert time.monotonic() - begun < 5
        assert valkey.info("commandstats")["cmdstat_mget"]["calls"] == before + 1

    def test_of_no_pairs_need_no_redis(self) -> None:
        store = RedisStore(None, LOG)
        assert store.forgotten([]) == {}
        assert store.forget([])


class TestPushing:
    def test_puts_the_task_into_the_store_and_tells_of_it(
        self, store: RedisStore, valkey: Redis, heard: Callable[[str], list[Any]]
    ) -> None:
        task = a_task()
        heard("operator-1")
        assert store.push_tasks("operator-1", [task])
        expected = {
            "id": str(task.id),
            "kind": "NeedToWriteMailTask",
            "module": "postChatMail",
            "operatorId": "operator-1",
            "ladyDbId": 1042,
            "manUlid": "01HZX3V7Q8R2M4N6P8S0T2W4Y6",
            "eventAt": "2026-01-31T22:54:00.120Z",
            "eventTrigger": "2026-01-31T22:54:00.120Z",
            "status": "active",
            "createdAt": "2026-01-31T23:05:00.120Z",
        }
        stored = valkey.hgetall("chathouse:operator:operator-1:tasks")
        assert {task_id: json.loads(entry) for task_id, entry in stored.items()} == {str(task.id): expected}
        assert heard("operator-1") == [expected]

    def test_writes_moments_in_utc_whatever_zone_they_are_in(self) -> None:
        moment = datetime(2026, 2, 1, 0, 54, 0, 120_999, tzinfo=timezone(timedelta(hours=2)))
        assert json.loads(a_task(event_at=moment).to_json())["eventAt"] == "2026-01-31T22:54:00.120Z"

    def test_leaves_what_is_there(self, store: RedisStore, valkey: Redis) -> None:
        valkey.hset(store_key("operator-1"), "other", "whatever")
        tasks = [a_task(), a_task()]
        assert store.push_tasks("operator-1", tasks)
        assert valkey.hkeys(store_key("operator-1")) == ["other", *(str(task.id) for task in tasks)]

    def test_into_a_key_of_another_kind_fails_and_says_so(
        self, store: RedisStore, valkey: Redis, caplog: pytest.LogCaptureFixture
    ) -> None:
        valkey.set(store_key("operator-1"), "a string")
        assert not store.push_tasks("operator-1", [a_task()])
        assert caplog.messages == ["Redis refuses (WRONGTYPE): 1 of 2 commands about stores"]
        assert store.push_tasks("operator-2", [a_task("operator-2")])

    def test_of_nothing_needs_no_redis(self) -> None:
        assert RedisStore(None, LOG).push_tasks("operator-1", [])


class TestRefilling:
    def refill(self, store: RedisStore, **active: list[StoredTask]) -> Refill:
        return store.refill(store.read_stores(active), active)

    def test_adds_what_is_missing_and_tells_of_it(
        self, store: RedisStore, valkey: Redis, heard: Callable[[str], list[Any]]
    ) -> None:
        there, missing = a_task(), a_task()
        store.push_tasks("one", [there])
        heard("one")
        assert self.refill(store, one=[there, missing]) == Refill(1, 0, frozenset())
        assert set(valkey.hkeys(store_key("one"))) == {str(there.id), str(missing.id)}
        assert [message["id"] for message in heard("one")] == [str(missing.id)]

    def test_removes_ours_that_are_closed(
        self, store: RedisStore, valkey: Redis, heard: Callable[[str], list[Any]]
    ) -> None:
        closed, active = a_task(), a_task()
        store.push_tasks("one", [closed, active])
        heard("one")
        assert self.refill(store, one=[active]) == Refill(0, 1, frozenset())
        assert valkey.hkeys(store_key("one")) == [str(active.id)]
        assert heard("one") == []

    def test_serves_many_operators_at_once_and_each_with_its_own(self, store: RedisStore, valkey: Redis) -> None:
        tasks = {f"operator-{number}": [a_task(), a_task()] for number in range(200)}
        assert self.refill(store, **tasks) == Refill(400, 0, frozenset())
        assert self.refill(store, **tasks) == Refill(0, 0, frozenset())
        assert all(
            set(valkey.hkeys(store_key(operator_id))) == {str(task.id) for task in stored}
            for operator_id, stored in tasks.items()
        )
        assert self.refill(store, **{operator_id: [] for operator_id in tasks}) == Refill(0, 400, frozenset())
        assert valkey.keys() == []

    @pytest.mark.parametrize(
        "entry",
        [
            '{"module": "unansweredMail", "status": "active"}',
            '{"module": null}',
            "{}",
            "[]",
            '["postChatMail"]',
            '"postChatMail"',
            "no JSON postChatMail",
            "",
            b"\xff\xfe\x00",
            "[" * 100_000,
        ],
    )
    def test_never_touches_what_is_not_ours(self, store: RedisStore, valkey: Redis, entry: str | bytes) -> None:
        active, closed = a_task(), a_task()
        valkey.hset(store_key("one"), "theirs", entry)
        # Even where it lies under the id of a task of ours.
        valkey.hset(store_key("one"), str(active.id), entry)
        store.push_tasks("one", [closed])
        assert self.refill(store, one=[active]) == Refill(0, 1, frozenset())
        with Redis.from_url(_url_of(valkey)) as raw:
            expected = entry if isinstance(entry, bytes) else entry.encode()
            assert raw.hgetall(store_key("one")) == {b"theirs": expected, str(active.id).encode(): expected}

    def test_removes_no_task_that_came_after_the_stores_were_read(self, store: RedisStore, valkey: Redis) -> None:
        stores = store.read_stores(["one"])
        new = a_task()
        store.push_tasks("one", [new])
        assert store.refill(stores, {"one": []}) == Refill(0, 0, frozenset())
        assert valkey.hkeys(store_key("one")) == [str(new.id)]

    def test_does_not_write_over_what_somebody_put_there_meanwhile(self, store: RedisStore, valkey: Redis) -> None:
        task = a_task()
        stores = store.read_stores(["one"])
        valkey.hset(store_key("one"), str(task.id), "changed")
        assert store.refill(stores, {"one": [task]}).added == 0
        assert valkey.hget(store_key("one"), str(task.id)) == "changed"

    def test_of_one_whose_key_is_of_another_kind_fails_alone(
        self, store: RedisStore, valkey: Redis, caplog: pytest.LogCaptureFixture
    ) -> None:
        valkey.set(store_key("broken"), "a string")
        stores = store.read_stores(["broken", "sound"])
        assert stores == {"broken": None, "sound": OperatorStore(frozenset(), frozenset())}
        active = {"broken": [a_task()], "sound": [a_task()]}
        assert store.refill(stores, active) == Refill(1, 0, frozenset({"broken"}))
        assert caplog.messages == ["Redis refuses (WRONGTYPE): 1 of 2 commands about stores"]

    def test_of_one_whose_key_changes_its_kind_meanwhile_fails_alone(self, store: RedisStore, valkey: Redis) -> None:
        stores = store.read_stores(["broken", "sound"])
        valkey.set(store_key("broken"), "a string")
        active = {"broken": [a_task()], "sound": [a_task()]}
        assert store.refill(stores, active) == Refill(1, 0, frozenset({"broken"}))

    def test_after_redis_lost_everything_restores_the_stores(self, store: RedisStore, valkey: Redis) -> None:
        task = a_task()
        store.push_tasks("one", [task])
        valkey.flushall()
        assert self.refill(store, one=[task]).added == 1
        assert valkey.hget(store_key("one"), str(task.id)) == task.to_json()

    def test_an_operator_may_be_called_anything(self, store: RedisStore, valkey: Redis) -> None:
        name = "оператор 1: *[?]\n"
        assert self.refill(store, **{name: [a_task(name)]}).added == 1
        assert valkey.keys() == [f"chathouse:operator:{name}:tasks"]


def assert_nothing_is_known(store: RedisStore) -> None:
    """Every method answers, and none of them that it knows or has done anything."""
    pair = a_pair()
    assert store.forgotten([pair]) == {pair: None}
    assert not store.forget([pair])
    assert not store.push_tasks("one", [a_task()])
    stores = store.read_stores(["one"])
    assert stores == {"one": None}
    assert store.refill(stores, {"one": [a_task()]}) == Refill(0, 0, frozenset({"one"}))
    empty = {"one": OperatorStore(frozenset(), frozenset())}
    assert store.refill(empty, {"one": [a_task()]}) == Refill(0, 0, frozenset({"one"}))


def test_without_a_redis_nothing_is_known_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert_nothing_is_known(RedisStore(None, LOG))
    assert caplog.messages == []


@contextmanager
def a_server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a server that does this with each connection."""
    over = threading.Event()
    connections: list[socket.socket] = []

    def handle(connection: socket.socket) -> None:
        with suppress(OSError):
            serve(connection)
            over.wait(30)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connections.append(listener.accept()[0])
                threading.Thread(target=handle, args=(connections[-1],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"redis://:{PASSWORD}@127.0.0.1:{listener.getsockname()[1]}/0"
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()


def says(data: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        while connection.recv(65536):
            connection.sendall(data)

    return answer


def drips(connection: socket.socket) -> None:
    connection.recv(65536)
    while True:
        connection.sendall(b"x")
        time.sleep(0.1)


def hangs_up(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.shutdown(socket.SHUT_RDWR)


class TestARedisThat:
    @pytest.mark.parametrize(
        ("serve", "words"),
        [
            (lambda _: None, "does not answer in time"),
            (hangs_up, "cannot be reached"),
            (says(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "refuses (InvalidResponse)"),
            (says(b"\x00\xff" * 1000), ""),
            (says(b"$-5\r\n"), ""),
            (says(b"*99999999\r\n"), ""),
            (says(b"-LOADING Redis is loading the dataset in memory\r\n"), ""),
            (says(b"-ERR max number of clients reached\r\n"), ""),
        ],
        ids=["is silent", "hangs up", "speaks HTTP", "sends noise", "minus five", "endless", "loading", "full"],
    )
    def test_fails_costs_little_time_and_one_line(
        self, serve: Callable[[socket.socket], None], words: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        begun = time.monotonic()
        with a_server(serve) as url, connect_to_redis(url, timeout=timedelta(seconds=0.3)) as client:
            assert_nothing_is_known(RedisStore(client, LOG))
        assert time.monotonic() - begun < 5
        (line,) = caplog.messages
        assert line.startswith(f"Redis {words}")
        assert line.endswith(": marks of this check are left out")
        _assert_says_nothing(caplog, url)

    def test_answers_byte_by_byte_is_not_waited_for(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("pin_jobs.chathouse.redis_client._PATIENCE_SECONDS", 0.5)
        begun = time.monotonic()
        with a_server(drips) as url, connect_to_redis(url) as client:
            assert_nothing_is_known(RedisStore(client, LOG))
        assert 0.5 <= time.monotonic() - begun < 5
        assert caplog.messages == ["Redis does not answer in time: marks of this check are left out"]

    def test_is_not_there_costs_no_time(self, caplog: pytest.LogCaptureFixture) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        url = f"redis://:{PASSWORD}@127.0.0.1:{port}/0"
        begun = time.monotonic()
        with connect_to_redis(url) as client:
            assert_nothing_is_known(RedisStore(client, LOG))
        assert time.monotonic() - begun < 2
        assert caplog.messages == ["Redis cannot be reached: marks of this check are left out"]
        _assert_says_nothing(caplog, url)

    @pytest.mark.parametrize("url", ["redis://nowhere.invalid/0", "unix:///nowhere.sock"])
    def test_has_no_address_is_not_there(self, url: str, caplog: pytest.LogCaptureFixture) -> None:
        with connect_to_redis(url) as client:
            assert_nothing_is_known(RedisStore(client, LOG))
        assert caplog.messages == ["Redis cannot be reached: marks of this check are left out"]


@pytest.fixture
def own_valkey() -> Iterator[EmbeddedValkey]:
    """A Valkey for one test, to be broken."""
    with tempfile.TemporaryDirectory(prefix="pj_") as folder, EmbeddedValkey(Path(folder) / "valkey") as valkey:
        yield valkey


class TestAValkeyThat:
    def test_comes_back_is_used_again_after_a_rest(
        self, own_valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture
    ) -> None:
        now = [0.0]
        pair = a_pair()
        with connect_to_redis(own_valkey.url, timeout=timedelta(seconds=0.3)) as client:
            store = RedisStore(client, LOG, clock=lambda: now[0])
            assert store.forget([pair])
            with frozen(own_valkey):
                assert store.forgotten([pair]) == {pair: None}
            # Still at rest; then asked again.
            assert store.forgotten([pair]) == {pair: None}
            now[0] = 11.0
            assert store.forgotten([pair]) == {pair: True}
        assert caplog.messages == ["Redis does not answer in time: marks of this check are left out"]

    def test_closed_our_connection_is_connected_to_anew(
        self, own_valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture
    ) -> None:
        pair = a_pair()
        with connect_to_redis(own_valkey.url) as client, Redis.from_url(own_valkey.url) as admin:
            store = RedisStore(client, LOG)
            assert store.forget([pair])
            admin.client_kill_filter(_type="normal", skipme=True)
            assert store.forgotten([pair]) == {pair: True}
        assert caplog.messages == []

    def test_loses_our_connection_in_the_middle_is_asked_once_more(
        self, valkey_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        pair = a_pair()
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            _passing(listener, _address(valkey_url), lost=1),
            connect_to_redis(f"redis://127.0.0.1:{listener.getsockname()[1]}/0") as client,
        ):
            assert RedisStore(client, LOG).forgotten([pair]) == {pair: False}
        assert caplog.messages == []

    @pytest.mark.parametrize("password", [PASSWORD, ""], ids=["a wrong one", "none"])
    def test_wants_another_password_says_so(
        self, own_valkey: EmbeddedValkey, password: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Redis.from_url(own_valkey.url) as admin:
            admin.config_set("requirepass", "another")
            url = own_valkey.url.replace("redis://", f"redis://:{password}@" if password else "redis://")
            with connect_to_redis(url) as client:
                assert_nothing_is_known(RedisStore(client, LOG))
            admin.execute_command("AUTH", "another")
            admin.config_set("requirepass", "")
        assert caplog.messages == ["Redis does not accept the password: marks of this check are left out"]
        _assert_says_nothing(caplog, url)

    def test_forbids_a_command_refuses_that_alone(
        self, own_valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Redis.from_url(own_valkey.url) as admin:
            admin.acl_setuser(
                "reader", enabled=True, passwords=[f"+{PASSWORD}"], keys=["*"], commands=["+@all", "-set"]
            )
        pair = a_pair()
        with connect_to_redis(own_valkey.url.replace("redis://", f"redis://reader:{PASSWORD}@")) as client:
            store = RedisStore(client, LOG)
            assert not store.forget([pair])
            assert store.forgotten([pair]) == {pair: False}
        (line,) = caplog.messages
        assert line.startswith("Redis refuses (")
        assert PASSWORD not in line

    def test_is_out_of_memory_fails_and_says_so(
        self, own_valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Redis.from_url(own_valkey.url) as admin:
            admin.config_set("maxmemory", "1")
            with connect_to_redis(own_valkey.url) as client:
                assert not RedisStore(client, LOG).forget([a_pair(), a_pair()])
            admin.config_set("maxmemory", "0")
        (line,) = caplog.messages
        assert line.startswith("Redis refuses (")
        assert line.endswith("2 of 2 commands about marks")


class TestUrls:
    def test_of_a_unix_socket_work(self, valkey_url: str, valkey: Redis) -> None:
        with tempfile.TemporaryDirectory(prefix="pj_") as folder:
            path = f"{folder}/redis.sock"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen()
                with _passing(listener, _address(valkey_url)):
                    self.assert_works(f"unix://{path}", valkey)

    def test_of_tls_work_and_the_certificate_is_checked(
        self, valkey_url: str, valkey: Redis, caplog: pytest.LogCaptureFixture
    ) -> None:
        authority = trustme.CA()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            authority.cert_pem.tempfile() as certificate,
            _passing(listener, _address(valkey_url), tls=context),
        ):
            url = f"rediss://127.0.0.1:{listener.getsockname()[1]}/0"
            self.assert_works(f"{url}?ssl_ca_certs={certificate}", valkey)
            with connect_to_redis(url) as client:
                assert RedisStore(client, LOG).forgotten([a_pair()]).values() != {True}
        assert caplog.messages == ["Redis cannot be reached: marks of this check are left out"]

    def assert_works(self, url: str, valkey: Redis) -> None:
        pair = a_pair()
        with connect_to_redis(url) as client:
            assert RedisStore(client, LOG).forget([pair])
        assert valkey.exists(forgotten_key(pair))

    @pytest.mark.parametrize(
        "url", ["", "s3cr3t", "http://:s3cr3t@h", "redis://:s3cr3t@h:port", "redis://[s3cr3t", "redis://h?db=s3cr3t"]
    )
    def test_that_are_none_are_refused_and_not_shown(self, url: str) -> None:
        with pytest.raises(InvalidRedisUrl) as error:
            connect_to_redis(url)
        assert "s3cr3t" not in repr(error.value)
        assert error.value.__suppress_context__


@contextmanager
def frozen(valkey: EmbeddedValkey) -> Iterator[None]:
    """Stopped in its tracks: connections are made, and nothing is answered."""
    (process,) = processes_in(valkey.log.parent, "valkey-server")
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


@contextmanager
def _passing(
    listener: socket.socket, address: tuple[str, int], *, tls: ssl.SSLContext | None = None, lost: int = 0
) -> Iterator[None]:
    """Passes connections on to another address, out of TLS if there is any; the first ones are lost once they ask."""
    to_lose = iter(range(lost))
    ends: list[socket.socket] = []

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            try:
                client = listener.accept()[0]
            except OSError:
                return
            with suppress(OSError):
                client = tls.wrap_socket(client, server_side=True) if tls else client
                if next(to_lose, None) is not None:
                    client.recv(1)
                    client.close()
                    continue
                server = socket.create_connection(address)
                ends.extend((client, server))
                threading.Thread(target=copy, args=(client, server), daemon=True).start()
                threading.Thread(target=copy, args=(server, client), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield
    listener.shutdown(socket.SHUT_RDWR)
    for end in ends:
        end.close()


def _assert_says_nothing(caplog: pytest.LogCaptureFixture, url: str) -> None:
    assert PASSWORD not in caplog.text
    assert url.rpartition("@")[2].removesuffix("/0") not in "".join(caplog.messages)


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("redis://").partition("/")[0].rpartition(":")
    return host, int(port)


def _url_of(client: Redis) -> str:
    arguments = client.connection_pool.connection_kwargs
    return f"redis://{arguments['host']}:{arguments['port']}/{arguments.get('db', 0)}"
