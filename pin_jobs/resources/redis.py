"""Redis as a Dagster resource."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from dagster import ConfigurableResource
from pydantic import Field

from pin_jobs.chathouse.redis_client import connect_to_redis
from pin_jobs.chathouse.redis_store import RedisStore


class RedisResource(ConfigurableResource[None]):
    """Where the post-chat mail keeps what may be lost. Without a URL it works, and knows no marks and fills no stores.

    Give `url` as an `EnvVar`: Dagster shows a plain value, password and all, in the launchpad.
    """

    url: str = Field(
        default="",
        description="As an EnvVar: redis://:password@host:6379/0, rediss://... (TLS) or unix://... Empty: no Redis.",
    )
    timeout_seconds: float = Field(
        default=2.0, description="For connecting, and for each part of an answer. A lost connection is replaced once."
    )

    @contextmanager
    def store(self, log: logging.Logger) -> Iterator[RedisStore]:
        """The marks and stores in this Redis; its connections are closed at the end.

        Raises:
            InvalidRedisUrl: the message shows nothing of it.
        """
        if not self.url.strip():
            yield RedisStore(None, log)
            return
        client = connect_to_redis(self.url, timeout=timedelta(seconds=self.timeout_seconds))
        try:
            yield RedisStore(client, log)
        finally:
            client.close()
