"""Waiting for a condition instead of sleeping."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], timeout: float, what: str) -> T:
    """Ask until the answer is true, and return it; fail naming `what` after `timeout` seconds."""
    give_up = time.monotonic() + timeout
    while True:
        if answer := condition():
            return answer
        assert time.monotonic() < give_up, f"waited {timeout:g} s in vain for {what}"
        time.sleep(0.02)


@contextmanager
def when(condition: Callable[[], object], act: Callable[[], object]) -> Iterator[None]:
    """Acts, in a thread of its own, as soon as the condition holds."""

    def watch() -> None:
        wait_for(condition, timeout=5, what="the moment to act")
        act()

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        yield
        watching.result()
