"""No wait for the client's thread is without an end."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import pytest

from engines.errors import DeadlineExceeded, InvalidRequest
from trainer_client import BlockingRolloutClient, loop_thread
from trainer_client.loop_thread import LoopThread

SOON_S = 30.0

_IN_A_FORK = """
import os, sys
from engines.errors import InvalidRequest
from trainer_client import BlockingRolloutClient
client = BlockingRolloutClient("http://127.0.0.1:9")
if (child := os.fork()) == 0:
    try:
        client.status()
    except InvalidRequest as error:
        print(error, flush=True)
    client.close()
    os._exit(0)
os.waitpid(child, 0)
client.close()
"""


async def number() -> int:
    return 7


async def nothing() -> None:
    """The last call of a thread that has nothing to close."""


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("a test's loop")
    yield thread
    thread.close(nothing)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    beside = threading.Thread(target=work, daemon=True)
    beside.start()
    return beside


def ends_with(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException | None]]:
    """A thread that makes the call, and the call's error."""
    ends: list[BaseException | None] = []

    def work() -> None:
        try:
            call()
            ends.append(None)
        except BaseException as error:
            ends.append(error)

    return in_thread(work), ends


def test_a_call_after_the_close_is_refused(thread: LoopThread) -> None:
    thread.close(nothing)
    with pytest.raises(InvalidRequest, match="closed"):
        thread.wait(number())
    with pytest.raises(InvalidRequest, match="closed"):
        thread.run(lambda: 7)


def test_a_call_during_the_close_is_refused(thread: LoopThread) -> None:
    asked = threading.Event()
    refused: list[BaseException | None] = []

    async def last() -> None:
        beside, ends = ends_with(lambda: thread.wait(number()))
        await asyncio.to_thread(beside.join, SOON_S)
        refused.extend(ends)
        asked.set()

    thread.close(last)
    assert asked.is_set()
    assert [type(error) for error in refused] == [InvalidRequest]


def test_the_close_ends_waits_of_other_threads(thread: LoopThread) -> None:
    began = threading.Event()

    async def long() -> None:
        began.set()
        await asyncio.Event().wait()

    beside, ends = ends_with(lambda: thread.wait(long()))
    assert began.wait(SOON_S)
    thread.close(nothing)
    beside.join(SOON_S)
    assert [str(error) for error in ends] == ["the client is closed: make another"]


def test_threads_may_close_it_at_the_same_time(thread: LoopThread) -> None:
    together = threading.Barrier(4)

    def close() -> None:
        together.wait()
        thread.close(nothing)

    closers = [ends_with(close) for _ in range(4)]
    for closer, _ in closers:
        closer.join(SOON_S)
    assert [ends for _, ends in closers] == [[None]] * 4


def test_a_close_ends_in_time_where_a_callback_does_not(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_end = threading.Event(), threading.Event()

    def callback() -> None:
        began.set()
        may_end.wait()

    ends_with(lambda: thread.run(callback))
    assert began.wait(SOON_S)
    monkeypatch.setattr(loop_thread, "_CLOSE_TIMEOUT_S", 0.01)
    closer, ends = ends_with(lambda: thread.close(nothing))
    closer.join(SOON_S)
    may_end.set()
    monkeypatch.undo()
    assert [type(error) for error in ends] == [DeadlineExceeded]


def wait_and_call(thread: LoopThread, inner: Callable[[], object], place: int, calls: list[int]) -> None:
    """Wait, and make the inner call before this line of the wait, as a signal handler would. `calls` gets the line, if
    there is such a line."""
    lines = count()

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line" and next(lines) == place:
            calls.append(place)
            inner()
        return trace

    sys.settrace(trace)
    try:
        thread.wait(number())
    finally:
        sys.settrace(None)


def at_every_line(begin: Callable[[LoopThread], Callable[[], object]]) -> set[type[BaseException]]:
    """Make the call that is begun so in the middle of a wait. Return the errors that waits ended with."""
    errors: set[type[BaseException]] = set()
    for place in count():
        thread, calls = LoopThread("a test's loop"), list[int]()
        beside, ends = ends_with(partial(wait_and_call, thread, begin(thread), place, calls))
        beside.join(SOON_S)
        assert len(ends) == 1, f"the wait hangs after line {place}"
        thread.close(nothing)
        errors |= {type(error) for error in ends if error is not None}
        if not calls:
            assert place > 10
            return errors
    raise AssertionError("the loop returns")


def test_a_thread_may_close_it_in_the_middle_of_its_wait() -> None:
    def begin(thread: LoopThread) -> Callable[[], object]:
        return lambda: thread.close(nothing)

    assert at_every_line(begin) == {InvalidRequest}


def test_a_thread_may_wait_in_the_middle_of_its_wait() -> None:
    def begin(thread: LoopThread) -> Callable[[], object]:
        return lambda: thread.wait(number())

    assert at_every_line(begin) == set()


def left_iteration(thread: LoopThread, is_closed: threading.Event) -> Callable[[], object]:
    """The end of an iteration that was left, as the garbage collector makes it."""

    async def source() -> AsyncGenerator[int]:
        try:
            yield 7
            yield 8
        finally:
            is_closed.set()

    client = BlockingRolloutClient.__new__(BlockingRolloutClient)
    client._thread = thread
    iteration = client._each(source())
    assert next(iteration) == 7
    return iteration.close


def test_an_iteration_may_end_in_the_middle_of_a_wait() -> None:
    closed: list[threading.Event] = []

    def begin(thread: LoopThread) -> Callable[[], object]:
        closed.append(threading.Event())
        return left_iteration(thread, closed[-1])

    assert at_every_line(begin) == set()


def test_an_iteration_that_ends_on_the_loops_thread_closes_its_source(thread: LoopThread) -> None:
    is_closed = threading.Event()
    thread.run(left_iteration(thread, is_closed))
    assert is_closed.wait(SOON_S)


def test_its_own_thread_is_refused_a_wait_and_may_make_calls(thread: LoopThread) -> None:
    def callback() -> str:
        assert thread.run(lambda: 7) == 7
        with pytest.raises(InvalidRequest, match="callback"):
            thread.close(nothing)
        with pytest.raises(InvalidRequest, match="callback") as refused:
            thread.wait(number())
        return str(refused.value)

    assert "its own client" in thread.run(callback)


def test_a_callback_that_exits_leaves_the_thread_alive(thread: LoopThread) -> None:
    def leave() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: seen.append(context["exception"]))
        loop.call_soon(sys.exit, 3)

    seen: list[BaseException] = []
    thread.run(leave)
    assert thread.wait(number()) == 7
    assert [type(error) for error in seen] == [SystemExit]


def test_a_forked_process_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", _IN_A_FORK], capture_output=True, text=True, timeout=SOON_S)
    assert (done.returncode, "forked" in done.stdout) == (0, True), done
