import logging

import pytest
from redis import Redis

from pin_jobs.chathouse.redis_client import InvalidRedisUrl
from pin_jobs.chathouse.redis_store import forgotten_key
from pin_jobs.resources.redis import RedisResource
from pin_jobs_tests.chathouse.factories_chathouse import Dialog, Lady, new_ulid
from pin_jobs_tests.waiting import wait_for

LOG = logging.getLogger("pin_jobs_tests")


def a_pair() -> Dialog:
    return Dialog(Lady(1, "lady-1", new_ulid(), "operator-1"), new_ulid())


def test_a_run_reads_and_writes_the_redis_that_the_resource_names(valkey: Redis, valkey_url: str) -> None:
    pair = a_pair()
    with RedisResource(url=f" {valkey_url}\n").store(LOG) as store:
        assert store.forget([pair])
    assert valkey.exists(forgotten_key(pair))


def test_its_connections_are_closed_with_it(valkey: Redis, valkey_url: str) -> None:
    def ours() -> set[str]:
        return {client["id"] for client in valkey.client_list() if client["name"] == "pin-jobs"}

    # Of earlier tests, perhaps.
    others = ours()
    with RedisResource(url=valkey_url).store(LOG) as store:
        store.forget([a_pair()])
        assert len(ours() - others) == 1
    wait_for(lambda: not ours() - others, 5, "the connection to be gone")


def test_without_a_url_nothing_is_known() -> None:
    pair = a_pair()
    with RedisResource().store(LOG) as store:
        assert store.forgotten([pair]) == {pair: None}


def test_a_url_that_is_none_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidRedisUrl) as error, RedisResource(url="http://:s3cr3t@h").store(LOG):
        pass
    assert "s3cr3t" not in str(error.value)
