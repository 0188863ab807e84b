"""The simulated engine where it has no room, and its end. Its dialect is in the conformance suite."""

import signal
import socket
import subprocess
import sys
import time

import pytest

from engines.config import SimConfig
from engines.process.port import free_port
from sim.model import SimModel, seeded_draw
from tests.rigs.rig import StartRig
from tests.rigs.waiting import wait_until

PROMPT = [5, 6, 7]


@pytest.mark.parametrize("kv_tokens", [4096, 140])
async def test_samples_that_do_not_fit_wait_and_are_served_in_the_end(start_rig: StartRig, kv_tokens: int) -> None:
    """It runs eight at a time, or fewer."""
    rig = await start_rig(1, sim={"kv_tokens": kv_tokens})
    reply = await rig.complete(PROMPT, n=12, seed=1, max_tokens=40, ignore_eos=True)
    model = SimModel.of(SimConfig())
    for index, choice in enumerate(reply["choices"]):
        draw = seeded_draw(1, index)
        assert choice["token_ids"] == model.complete(PROMPT, draw=draw, max_tokens=40, ignore_eos=True)


def test_the_process_ends_on_sigterm_whatever_it_is_doing() -> None:
    port = free_port()
    command = [sys.executable, "-m", "sim.server", "--port", str(port), "--sim", '{"decode_step_s": 0.01}']
    process = subprocess.Popen(command)
    try:
        wait_until(lambda: _connects(port), 30)
        with socket.create_connection(("127.0.0.1", port)) as client:
            body = b'{"prompt": [5], "max_tokens": 4000, "ignore_eos": true}'
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0  # the request would take forty seconds
    finally:
        process.kill()
        process.wait()


def _connects(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
