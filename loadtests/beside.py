"""Background work of a run, in its master: periodic weight updates, and what is measured beside the users."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gevent
import orjson
from gevent import Greenlet
from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import WorkerRunner

from loadtests.run import Run, checked
from loadtests.server_watch import ServerWatch

_READY_S = 60.0
_STOP_S = 60.0


def _find_weights(weights: str) -> None:
    """Raise `ValueError` if there are no weights to push."""
    if weights != "sim" and not any(Path(weights).glob("*.safetensors")):
        raise ValueError(f"{weights} has no safetensors: give a checkpoint's folder, or 'sim' for simulated engines")


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument
    add("--update-every", type=float, default=0.0, help="seconds between weight updates; default: none")
    add(
        "--weights",
        type=checked(_find_weights),
        default="sim",
        help="weights to push: a checkpoint's folder, or sim for simulated engines",
    )
    add("--watch-pid", type=int, default=0, help="measure memory and CPU of this process, such as the gateway's")


class Updates:
    """A process that pushes versions (`loadtests.updates`), and its reports. Ready after construction."""

    def __init__(self, run: Run) -> None:
        self._run = run
        settings = run.settings
        command = [sys.executable, "-m", "loadtests.updates", settings.host or ""]
        command += ["--every", str(settings.update_every), "--weights", settings.weights]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        with gevent.Timeout(_READY_S, TimeoutError(f"weight updates were not ready within {_READY_S:g} s")):
            if self._stdout.readline().strip() != b"ready":
                raise RuntimeError(f"weight updates ended at their start, with {self._process.wait()}")
        self._reader: Greenlet | None = None
        self._failed: int | None = None

    def start(self, **_: Any) -> None:
        self._stdin.write(b"go\n")
        self._stdin.flush()
        self._reader = gevent.spawn(self._read)

    def stop(self, **_: Any) -> None:
        """Stop further updates; returns at once, while users go on."""
        self._failed = self._process.poll()
        self._stdin.close()

    def end(self, **_: Any) -> None:
        """Wait for the update in flight, within a bound. A process that ended by itself has failed."""
        failed = self._failed
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            failed = -1
        if self._reader is not None:
            self._reader.join(_STOP_S)
        if failed is not None:
            print(f"weight updates ended early, with {failed}", file=sys.stderr)
            self._run.record("failed_update_s", 0.0)

    def _read(self) -> None:
        for line in self._stdout:
            update = orjson.loads(line)
            name = "failed_update_s" if update["error"] else "update_s"
            self._run.record(name, update["seconds"], at=update["at"] - update["seconds"])
            if update["error"]:
                print(f"weight update failed: {update['error']}", file=sys.stderr)


@events.init.add_listener
def prepare(environment: Environment, runner: Any, **_: Any) -> None:
    if isinstance(runner, WorkerRunner):
        return
    run = Run.of(environment)
    besides: list[Updates | ServerWatch] = [ServerWatch(run)]
    if run.settings.update_every:
        try:
            besides.append(Updates(run))
        except (RuntimeError, TimeoutError) as error:
            runner.quit()  # or workers would wait a minute for the master
            raise SystemExit(str(error)) from error
    for beside in besides:
        environment.events.test_start.add_listener(beside.start)
        environment.events.test_stopping.add_listener(beside.stop)
        environment.events.test_stop.add_listener(beside.end)
