"""An event loop on its own thread, for callers without one. Every wait for it ends, also where the loop is closed."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
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
        self._is_over = False
        self._one_at_a_time = threading.Lock()
        """Of calls and the close: the close finds every call that it does not refuse."""
        self._calls: set[Future[Any]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """True after `close`, and in a forked process."""
        return self._is_over or not self._thread.is_alive()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result. An interrupted wait cancels it."""
        try:
            call = self._begun(coroutine)
        except InvalidRequest:
            coroutine.close()
            raise
        try:
            return call.result()
        except CancelledError:
            if self._is_over:
                raise closed() from None
            raise
        except BaseException:
            call.cancel()
            raise
        finally:
            self._calls.discard(call)

    def run(self, call: Callable[[], T]) -> T:
        """Return the result of a call on the loop's thread."""
        if threading.current_thread() is self._thread:
            return call()

        async def called() -> T:
            return call()

        return self.wait(called())

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel what other threads wait for, run `last`, and end the thread. May be called twice.

        Raise `DeadlineExceeded` where a callback keeps the thread busy.
        """
        self._check_caller()
        if not self._thread.is_alive():
            return
        with self._one_at_a_time:
            if not self._is_over:
                self._is_over = True
                self._loop.call_soon_threadsafe(self._begin_close, last)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the client has not closed within {_CLOSE_TIMEOUT_S:g} s: a callback does not end")
        if self._closing is not None:
            self._closing.result()

    def _begun(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        self._check_caller()
        if not self.is_over:
            with self._one_at_a_time:
                if not self._is_over:
                    call = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
                    self._calls.add(call)
                    return call
        if self._is_over:
            raise closed()
        raise InvalidRequest("the client belongs to the process that this was forked from: make another here")

    def _check_caller(self) -> None:
        if threading.current_thread() is self._thread:
            raise InvalidRequest(
                "a callback cannot wait for its own client, whose thread it runs on: call it elsewhere"
            )

    # On the loop's thread

    def _run(self) -> None:
        while self._closing is None or not self._closing.done():
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # of a callback: others wait for the loop
                self._loop.call_exception_handler({"message": "a callback raised", "exception": error})
        for call in list(self._calls):  # of what did not end in time
            call.cancel()
        self._loop.close()

    def _begin_close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._closing = self._loop.create_task(self._cancel_all_and_run(last))
        self._closing.add_done_callback(lambda _: self._loop.stop())

    async def _cancel_all_and_run(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if running := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=_STEP_TIMEOUT_S)
        await asyncio.wait_for(last(), _STEP_TIMEOUT_S)
