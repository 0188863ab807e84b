"""An event loop on its own thread, for callers without one. Every wait for it ends, also where the loop is closed."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from engines.errors import DeadlineExceeded, InvalidRequest
from trainer_client.http import closed

T = TypeVar("T")

_STEP_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 4 * _STEP_TIMEOUT_S  # longer than the steps of an end together


class LoopThread:
    """Runs coroutines for other threads, until `close`.

    Raises `InvalidRequest` where a call would wait for ever: after `close`, from the loop's own thread, and in a forked
    process, which has no such thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._order = threading.Lock()
        """Of calls and the close, which cancels the calls before it."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result. An interrupted wait cancels it."""
        try:
            self._check_caller()
            self._check_open()  # without the lock, which a fork may have left held
            with self._order:
                self._check_open()
                call = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except InvalidRequest:
            coroutine.close()
            raise
        try:
            return call.result()
        except CancelledError:
            self._check_open()
            raise
        except BaseException:
            call.cancel()
            raise

    def run(self, call: Callable[[], T]) -> T:
        """Return the result of a call on the loop's thread."""

        async def called() -> T:
            return call()

        return self.wait(called())

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel what other threads wait for, run `last`, and end the thread. May be called twice.

        Raise `DeadlineExceeded` where an iterator of tasks keeps the thread busy.
        """
        self._check_caller()
        if self._is_closed or not self._thread.is_alive():
            return
        with self._order:
            self._is_closed = True
            end = asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
            end.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        try:
            end.result(_CLOSE_TIMEOUT_S)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the client has not closed within {_CLOSE_TIMEOUT_S:g} s: an iterator of tasks does not end"
            ) from error
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if running := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=_STEP_TIMEOUT_S)
        await asyncio.wait_for(last(), _STEP_TIMEOUT_S)

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed()
        if not self._thread.is_alive():
            raise InvalidRequest("the client belongs to the process that this was forked from: make another here")

    def _check_caller(self) -> None:
        if threading.current_thread() is self._thread:
            raise InvalidRequest(
                "an iterator of tasks cannot wait for its own client, whose thread reads it: call it elsewhere"
            )
