"""No wait for the client's thread is without an end."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from engines.errors import DeadlineExceeded, InvalidRequest
from trainer_client import loop_thread
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


def ends_with(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException | None]]:
    """A thread that makes the call, and the call's error."""
    ends: list[BaseException | None] = []

    def work() -> None:
        try:
            call()
            ends.append(None)
        except BaseException as error:
            ends.append(error)

    beside = threading.Thread(target=work, daemon=True)
    beside.start()
    return beside, ends


def test_a_call_after_the_close_is_refused(thread: LoopThread) -> None:
    thread.close(nothing)
    with pytest.raises(InvalidRequest, match="closed"):
        thread.wait(number())
    with pytest.raises(InvalidRequest, match="closed"):
        thread.run(lambda: 7)


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


def test_its_own_thread_is_refused_a_wait_and_may_make_calls(thread: LoopThread) -> None:
    def callback() -> str:
        assert thread.run(lambda: 7) == 7
        with pytest.raises(InvalidRequest, match="callback"):
            thread.close(nothing)
        with pytest.raises(InvalidRequest, match="callback") as refused:
            thread.wait(number())
        return str(refused.value)

    assert "its own client" in thread.run(callback)


def test_a_forked_process_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", _IN_A_FORK], capture_output=True, text=True, timeout=SOON_S)
    assert (done.returncode, "forked" in done.stdout) == (0, True), done
