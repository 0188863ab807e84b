"""Requests that a gateway has recorded, sent again when they came then.

    rollout-gateway up -c FILE.yaml gateway.trace.file=/tmp/trace.jsonl
    locust -f loadtests/scenarios/replay.py --headless --stop-timeout 600 --host URL --trace /tmp/trace.jsonl --speed 2

Open loop: each request is sent at its recorded time by `--speed`, and timed from then. The run ends with the trace.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gevent
from locust import LoadTestShape, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import WorkerRunner

from loadtests.run import Run, checked
from loadtests.scenarios.open_loop import OpenLoop
from loadtests.traces import Recorded, read_trace
from loadtests.workloads import completion_request

_KEPT = ("temperature", "top_p", "top_k", "min_p", "seed", "min_version", "max_staleness")
_SETTLE_S = 2.0


def _read(path: str) -> list[Recorded]:
    return read_trace(Path(path))


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", type=checked(_read), required=True, metavar="FILE", help="what gateway.trace.file recorded")
    add("--speed", type=float, default=1.0, help="times as fast as recorded")
    lengths = "of completions: as recorded (a request's mean), or as the model ends them within the recorded limits"
    add("--lengths", choices=["recorded", "model"], default="recorded", help=lengths)


class Share:
    """What this process sends of a trace: every so many-th request."""

    def __init__(self, environment: Environment, settings: Any) -> None:
        trace = _read(settings.trace)
        index, processes = 0, 1
        if isinstance(environment.runner, WorkerRunner):
            index, processes = environment.runner.worker_index, max(1, settings.processes or settings.expect_workers)
        self.began = time.perf_counter()
        self._left: Iterator[Recorded] = iter(trace[index % processes :: processes])

    def next(self) -> Recorded:
        """Raises `StopUser` at the end."""
        recorded = next(self._left, None)
        if recorded is None:
            raise StopUser
        return recorded


class Replayed(OpenLoop):
    """Sends what is next in its process's share."""

    _share: ClassVar[Share | None] = None

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        # Of all users of this process; its clock begins with the first.
        Replayed._share = Replayed._share or Share(environment, self.settings)

    @task
    def send(self) -> None:
        assert self._share is not None
        recorded = self._share.next()
        due = self._share.began + recorded.at / self.settings.speed
        gevent.sleep(max(0.0, due - time.perf_counter()))
        self._asked.spawn(self._send, recorded, due)

    def _send(self, recorded: Recorded, due: float) -> None:
        self.load_run.record("lateness_s", time.perf_counter() - due)
        sampling = {name: value for name, value in recorded.params.items() if name in _KEPT and value is not None}
        sampling["n"] = recorded.samples
        tokens = None
        if self.settings.lengths == "recorded" and recorded.tokens is not None:
            sampling |= {"max_tokens": recorded.tokens, "ignore_eos": True}
            tokens = recorded.tokens * recorded.completions
        else:
            sampling["max_tokens"] = _limit(recorded)
        body = completion_request(recorded.prompts, {}, model=self.settings.model, stream=True) | sampling
        self.ask(body, completions=recorded.completions, tokens=tokens, session=recorded.session, intended=due)


class ToTheEnd(LoadTestShape):
    """As many users as -u says until all have sent what there was."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        settings, seconds = Run.of(self.runner.environment).settings, self.get_run_time()
        is_over = seconds > _SETTLE_S and self._has_begun and self.get_current_user_count() == 0
        if is_over or (settings.run_time and seconds > settings.run_time):
            return None
        users = max(settings.num_users or 1, getattr(self.runner, "worker_count", 1))  # each process has a share
        return users, float(users)

    @property
    def _has_begun(self) -> bool:
        """False while a process of --processes has not told that it has its users: a busy machine is slow to start."""
        workers = getattr(self.runner, "clients", None)
        return workers is None or not (workers.ready or workers.spawning)


def _limit(recorded: Recorded) -> int:
    named = ("max_tokens", "max_completion_tokens", "max_new_tokens")
    asked = next((recorded.params[name] for name in named if recorded.params.get(name)), None)
    return int(asked or recorded.tokens or 16)
