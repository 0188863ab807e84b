"""`RolloutClient` for a trainer without an event loop, and what its calls return.

The asynchronous objects live on a thread of their own, so that generation goes on while the trainer computes. Each
method and attribute here is the asynchronous one of its name.
"""

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import CancelledError
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from engines.errors import DeadlineExceeded, InvalidRequest
from trainer_client.batch import Batch
from trainer_client.client import RolloutClient
from trainer_client.http import closed

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


_STEP_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 4 * _STEP_TIMEOUT_S  # longer than the steps of an end together


class LoopThread:
    """An event loop on its own thread: runs coroutines for other threads, until `close`. Every wait for it ends.

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


class _Blocking(Generic[A]):
    """An asynchronous object, and the thread on which it is called."""

    def __init__(self, inner: A, thread: LoopThread) -> None:
        self._inner = inner
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or callable(value := getattr(self._inner, name)):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return value


def _waiting(call: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[_Blocking[A], P], T]:
    """Make a method that waits for `call`."""

    @functools.wraps(call)
    def wait(self: _Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.wait(call(self._inner, *args, **kwargs))

    return wait


def _beginning(
    call: Callable[Concatenate[A, P], T], wrapped: Callable[[T, LoopThread], R]
) -> Callable[Concatenate[_Blocking[A], P], R]:
    """Make a method that returns the result of `call`, which does not wait, `wrapped`."""

    @functools.wraps(call)
    def begin(self: _Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> R:
        async def begun() -> T:
            return call(self._inner, *args, **kwargs)

        return wrapped(self._thread.wait(begun()), self._thread)

    return begin


def _each(call: Callable[[A], AsyncGenerator[T]]) -> Callable[[_Blocking[A]], Generator[T]]:
    """Make a method that yields the items of `call`, whose loop closes it once an iteration has let go of it.

    Nothing waits for that: the garbage collector may end an iteration in any call of any thread.
    """

    @functools.wraps(call)
    def each(self: _Blocking[A]) -> Generator[T]:
        source = call(self._inner)

        async def following() -> T | None:
            return await anext(source, None)

        while (item := self._thread.wait(following())) is not None:
            yield item

    return each


class BlockingBatch(_Blocking[Batch]):
    """The rollouts of one call of `generate`, as `Batch`."""

    __iter__ = _each(Batch.__aiter__)
    rollouts = _each(Batch.rollouts)
    gather = _waiting(Batch.gather)
    cancel = _beginning(Batch.cancel, lambda none, _: none)


class BlockingRolloutClient(_Blocking[RolloutClient]):
    """`RolloutClient` with blocking calls and the same arguments.

    Usable from several threads. `close`, or the end of a `with` block, cancels running calls.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(RolloutClient(*args, **kwargs), LoopThread("rollout client"))

    def close(self) -> None:
        """Cancel running calls and drop the connections. May be called twice."""
        self._thread.close(self._inner.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    generate = _beginning(RolloutClient.generate, BlockingBatch)
    wait_ready = _waiting(RolloutClient.wait_ready)
    call = _waiting(RolloutClient.call)
    status = _waiting(RolloutClient.status)
    weight_version = _waiting(RolloutClient.weight_version)
    served_weights = _waiting(RolloutClient.served_weights)
    canary_token_ids = _waiting(RolloutClient.canary_token_ids)
