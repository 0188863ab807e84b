"""An event loop on its own thread, for callers without one. Every wait for it ends, also where the loop is closed."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from engines.errors import InvalidRequest

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 10.0


class LoopThread:
    """Runs coroutines for other threads, until `close`.

    Raises `InvalidRequest` where a call would wait for ever: after `close`, from the loop's own thread, and in a forked
    process, which has no such thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._one_at_a_time = threading.Lock()
        self._is_over = False
        self._has_ended = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._waits: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """True after `close`, and in a forked process."""
        return self._is_over or not self._thread.is_alive()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result. An interrupted wait cancels it."""
        try:
            self._check_caller()
            with self._one_at_a_time:
                self._check_open()
                future = asyncio.run_coroutine_threadsafe(self._noted(coroutine), self._loop)
                self._waits.add(future)
        except InvalidRequest:
            coroutine.close()
            raise
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
        finally:
            self._waits.discard(future)

    def run(self, call: Callable[[], T]) -> T:
        """Return the result of a call on the loop's thread."""
        if threading.current_thread() is self._thread:
            return call()

        async def called() -> T:
            return call()

        return self.wait(called())

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel what other threads wait for, run `last`, and end the thread. May be called twice."""
        self._check_caller()
        if not self._thread.is_alive():
            return
        with self._one_at_a_time:
            is_first, self._is_over = not self._is_over, True
        try:
            if is_first:
                asyncio.run_coroutine_threadsafe(self._end(last), self._loop).result()
        finally:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _check_caller(self) -> None:
        if threading.current_thread() is self._thread:
            raise InvalidRequest(
                "a callback cannot wait for its own client, whose thread it runs on: call it elsewhere"
            )

    def _check_open(self) -> None:
        if self._is_over:
            raise InvalidRequest("the client is closed: make another")
        if not self._thread.is_alive():
            raise InvalidRequest("the client belongs to the process that this was forked from: make another here")

    def _run(self) -> None:
        while not self._has_ended:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # of a callback: others wait for the loop
                self._loop.call_exception_handler({"message": "a callback raised", "exception": error})
        self._loop.close()

    async def _noted(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Have `close` know of a call."""
        call = asyncio.current_task()
        assert call is not None
        self._calls.add(call)
        try:
            return await coroutine
        finally:
            self._calls.discard(call)

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            for _ in range(2):  # a second time where a call takes too long to clean up
                if calls := set(self._calls):
                    for call in calls:
                        call.cancel()
                    await asyncio.wait(calls, timeout=_CLOSE_TIMEOUT_S)
            await asyncio.wait_for(last(), _CLOSE_TIMEOUT_S)
        finally:
            for wait in list(self._waits):
                wait.cancel()
            self._has_ended = True
            self._loop.call_soon(self._loop.stop)  # after the result of this has reached `close`
