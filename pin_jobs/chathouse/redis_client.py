"""A client of Redis that answers or fails in seconds, and says in words what is wrong."""

import re
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, TypeVar

from pin_jobs.errors import PinJobsError

if TYPE_CHECKING:
    from redis import Redis

# Redis itself gets less for each of its steps; this is for what has no limit of its own, such as looking up a name, or
# an answer that comes byte by byte.
_PATIENCE_SECONDS: Final = 5.0
T = TypeVar("T")


class InvalidRedisUrl(PinJobsError):
    """The URL of Redis cannot be used; the message shows nothing of it."""

    def __init__(self) -> None:
        super().__init__(
            "the URL of Redis is not of the form redis://:password@host:6379/0, rediss://... or unix://..."
        )


def connect_to_redis(url: str, *, timeout: timedelta = timedelta(seconds=2)) -> "Redis":
    """A client for `redis://`, `rediss://` (TLS) and `unix://` URLs; it connects when it is first used.

    `timeout` bounds the connecting, and the waiting for each part of an answer. A connection that turns out to be lost
    is replaced once; a server that is slow is not asked again.

    Raises:
        InvalidRedisUrl: the message shows nothing of the URL.
    """
    # A tenth of a second that a run without a use for Redis need not spend.
    from redis import Redis  # noqa: PLC0415  # see above
    from redis.backoff import NoBackoff  # noqa: PLC0415  # see above
    from redis.exceptions import ConnectionError as RedisConnectionError  # noqa: PLC0415  # see above
    from redis.retry import Retry  # noqa: PLC0415  # see above

    seconds = timeout.total_seconds()
    try:
        return Redis.from_url(
            url.strip(),
            socket_timeout=seconds,
            socket_connect_timeout=seconds,
            # The library's own default takes seconds to report a refused connection.
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            client_name="pin-jobs",
        )
    except (ValueError, TypeError):
        raise InvalidRedisUrl from None


def bounded(action: Callable[[], T]) -> T:
    """Run it in a thread that is left to itself when it takes too long."""
    outcomes: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def work() -> None:
        try:
            outcomes.put((action(), None))
        except Exception as error:  # noqa: BLE001  # raised again below
            outcomes.put((None, error))

    threading.Thread(target=work, name="Redis", daemon=True).start()
    try:
        result, error = outcomes.get(timeout=_PATIENCE_SECONDS)
    except Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # without an error it is a result


def words_of(error: Exception) -> str:
    """What is wrong, without what the error itself says: that may hold an address or a value."""
    from redis import exceptions  # noqa: PLC0415  # loaded with the client, which costs time

    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
        return "does not accept the password"
    if isinstance(error, TimeoutError | exceptions.TimeoutError):
        return "does not answer in time"
    if isinstance(error, exceptions.ConnectionError | OSError):
        return "cannot be reached"
    code = re.match(r"[A-Z]{3,}\b", str(error))
    return f"refuses ({code[0] if code else type(error).__name__})"
