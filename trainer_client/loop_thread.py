"""An event loop on its own thread, for callers without one. Every wait for it ends, also where the loop is closed.

The loop shares no lock with its callers, so that a signal handler may call in the middle of another call of its thread.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from engines.errors import DeadlineExceeded, InvalidRequest
from trainer_client.http import closed

T = TypeVar("T")

_STEP_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 4 * _STEP_TIMEOUT_S  # longer than the steps of an end together


class _Call(Generic[T]):
    """A coroutine that another thread waits for. Its queue gets the result, as a tuple, or the error."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.coroutine = coroutine
        self.task: asyncio.Task[T] | None = None
        self.outcome: SimpleQueue[tuple[T] | BaseException] = SimpleQueue()

    def begin(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[T]:
        self.task = task = loop.create_task(self.coroutine)
        task.add_done_callback(self._end)
        return task

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def refuse(self) -> None:
        """End the wait, since the client closes."""
        if self.task is None:
            self.coroutine.close()
        self.outcome.put(closed())

    def _end(self, task: asyncio.Task[T]) -> None:
        error = CancelledError() if task.cancelled() else task.exception()
        self.outcome.put((task.result(),) if error is None else error)
        self.task = None  # it dies on this thread: its weak references' callbacks would swallow a signal's error


class LoopThread:
    """Runs coroutines for other threads, until `close`.

    Raises `InvalidRequest` where a call would wait for ever: after `close`, from the loop's own thread, and in a forked
    process, which has no such thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_over = False
        self._closing: asyncio.Task[None] | None = None
        self._calls: set[_Call[Any]] = set()
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
            self._check_open()
        except InvalidRequest:
            coroutine.close()
            raise
        call = _Call(coroutine)
        self._calls.add(call)  # first: the end of the loop refuses calls that it finds here
        try:
            self._post(self._begin, call)
            outcome = call.outcome.get()
        except BaseException:
            self._post(call.cancel)
            raise
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome[0]

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
        self._is_over = True
        if not self._thread.is_alive():
            return
        self._post(self._begin_close, last)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the client has not closed within {_CLOSE_TIMEOUT_S:g} s: a callback does not end")
        if self._closing is not None:
            self._closing.result()

    def _check_caller(self) -> None:
        if threading.current_thread() is self._thread:
            raise InvalidRequest(
                "a callback cannot wait for its own client, whose thread it runs on: call it elsewhere"
            )

    def _check_open(self) -> None:
        if self._is_over:
            raise closed()
        if not self._thread.is_alive():
            raise InvalidRequest("the client belongs to the process that this was forked from: make another here")

    def _post(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Have the loop call back, or refuse all calls where it is closed."""
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            self._refuse_calls()

    def _refuse_calls(self) -> None:
        for call in list(self._calls):
            call.refuse()

    # On the loop's thread

    def _run(self) -> None:
        while self._closing is None or not self._closing.done():
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # of a callback: others wait for the loop
                self._loop.call_exception_handler({"message": "a callback raised", "exception": error})
        self._loop.close()
        self._refuse_calls()

    def _begin(self, call: _Call[Any]) -> None:
        if self._is_over:
            call.refuse()
        else:
            call.begin(self._loop).add_done_callback(lambda _: self._calls.discard(call))

    def _begin_close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._closing is None:
            self._closing = self._loop.create_task(self._cancel_calls_and_run(last))
            self._closing.add_done_callback(lambda _: self._loop.stop())

    async def _cancel_calls_and_run(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        for _ in range(2):  # a second time where a call takes too long to clean up
            running = {call.task: call for call in list(self._calls) if call.task is not None}
            for task, call in running.items():
                call.refuse()
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=_STEP_TIMEOUT_S)
        await asyncio.wait_for(last(), _STEP_TIMEOUT_S)
