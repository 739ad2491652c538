"""An event loop for callers in other threads."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class LoopClosed(Exception):
    """`close` was called."""


class LoopThread:
    """An event loop in a daemon thread: cancelling is what ends a request wherever it hangs, in a look-up too."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dialog API loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], patience: float) -> T:
        """Wait so many seconds for the coroutine, from another thread; it ends when the waiting does.

        Raises:
            TimeoutError: it took longer.
            LoopClosed: the loop is closed.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise LoopClosed from None
        try:
            return future.result(patience)
        except concurrent.futures.CancelledError:
            raise LoopClosed from None
        finally:
            future.cancel()

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel everything, run `last`, and end the thread; does nothing the second time."""
        with suppress(LoopClosed, TimeoutError):
            self.run(self._cancel_all(), patience=1)
        with suppress(LoopClosed, TimeoutError):
            self.run(last, patience=1)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(1)
            if not self._thread.is_alive():
                self._loop.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
