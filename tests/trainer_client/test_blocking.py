"""The blocking client does what the asynchronous one does, from a thread without an event loop."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from engines.errors import InvalidRequest
from tests.rigs.rig import Rig, StartRig
from trainer_client import BlockingRolloutClient, BlockingSessionGroups, SamplingParams
from trainer_client.sessions.calls import OpenSession

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
SOON_S = 30.0
TOKENS = SamplingParams(n=2, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(n=2, max_tokens=100, ignore_eos=True)


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rollout client"]


async def test_rollouts_are_gathered_and_iterated(rig: Rig) -> None:
    def work() -> None:
        with BlockingRolloutClient(rig.url) as client:
            client.wait_ready(timeout_s=SOON_S)
            rollouts = client.generate(PROMPTS, TOKENS).gather()
            assert [rollout.prompt_index for rollout in rollouts] == [0, 1, 2]
            batch = client.generate(PROMPTS, TOKENS)
            deadline = time.monotonic() + SOON_S
            while not batch.is_done and time.monotonic() < deadline:  # it goes on while the caller does something else
                time.sleep(0.01)
            assert batch.is_done
            assert sorted((c.prompt_index, c.sample_index) for c in batch) == [
                (prompt, sample) for prompt in range(3) for sample in range(2)
            ]
            assert {rollout.prompt_index for rollout in batch.rollouts()} == {0, 1, 2}
            assert (client.weight_version(), client.status()["ready"]) == (0, True)

    await asyncio.to_thread(work)
    assert not client_threads()


def raised(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that makes the call, and what it raises."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, errors


async def test_a_close_ends_the_waits_of_other_threads_and_later_calls_are_refused(start_rig: StartRig) -> None:
    rig = await start_rig(sim={"decode_step_s": 0.05})

    def work() -> list[BaseException]:
        client = BlockingRolloutClient(rig.url)
        thread, errors = raised(client.generate(PROMPTS, LONG).gather)
        client.close()
        client.close()  # again, without harm
        thread.join(SOON_S)
        for call in (client.status, lambda: client.generate(PROMPTS, TOKENS)):
            with pytest.raises(InvalidRequest, match="the client is closed"):
                call()
        return errors

    assert [str(error) for error in await asyncio.to_thread(work)] == ["the client is closed: make another"]


async def test_an_iterator_of_tasks_cannot_wait_for_its_own_client(rig: Rig) -> None:
    def work() -> None:
        def tasks() -> Iterator[int]:
            client.status()
            yield 0

        async def run(task: int, session: OpenSession) -> None:
            raise AssertionError("no task has come")

        with (
            BlockingRolloutClient(rig.url) as client,
            pytest.raises(InvalidRequest, match="its own client"),
        ):
            next(iter(BlockingSessionGroups(client, tasks(), run, n=1)))

    await asyncio.to_thread(work)


_IN_A_FORK = """
import os
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


def test_a_forked_process_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", _IN_A_FORK], capture_output=True, text=True, timeout=SOON_S)
    assert (done.returncode, "forked" in done.stdout) == (0, True), done
