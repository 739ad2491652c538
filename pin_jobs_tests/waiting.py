"""Waiting for a condition instead of sleeping."""

import time
from collections.abc import Callable
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
