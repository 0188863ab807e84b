"""vLLM's router, started for a comparison.

It is no dependency: install it into its own environment (`pip install vllm-router`), and give its command as an option
or in the environment.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from engines.process.port import free_port

_START_S = 60.0
_STOP_S = 10.0
_SHOWN_OF_A_LOG = 2000


class RouterFailed(RuntimeError):
    """A router that cannot be started, with the end of its log."""


@contextlib.contextmanager
def running_router(command: str, engines: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Run a router over these engines; yield its URL and process id. Other settings are its defaults, or in
    `command`."""
    port, words = free_port(), shlex.split(command)
    words += ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *engines]
    # By default both open a metrics port on all addresses.
    words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    with tempfile.NamedTemporaryFile(prefix="router-", suffix=".log") as log:
        try:
            process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        except OSError as error:
            raise RouterFailed(f"{command}: {error}") from error
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for_health(url, process, Path(log.name))
            yield url, process.pid
        finally:
            _end(process)


def _wait_for_health(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2.0):
                return
        except (OSError, urllib.error.URLError):
            if process.poll() is not None or time.monotonic() > deadline:
                words = log.read_text(errors="replace")[-_SHOWN_OF_A_LOG:]
                raise RouterFailed(f"{shlex.join(map(str, process.args))}\ndid not start:\n{words}") from None  # type: ignore[arg-type]
        time.sleep(0.1)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the whole process group: a router may have started helpers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(_STOP_S)
            return
        except subprocess.TimeoutExpired:
            continue
