"""A spike: arrivals at a steady rate, suddenly many times as many, then as before. Does it come back, and how soon?

    locust -f loadtests/scenarios/spike.py --headless -u 2 -t 90s --stop-timeout 60 --host URL --spike 2

A spike has to be more than the server can do. Without `--rate` the server's own speed is measured first, by `--probe`
requests at a time: the calm is `--calm` of it, and the spike is `--spike` times the server's speed; with `--rate` the
spike is that many times the rate. Each third of the run is reported by itself: `calm`, `spike`, `after`. `recovery_s`
is the time from the spike's end until first tokens are as soon as in the calm again.
"""

import time

import gevent
from gevent.pool import Group
from locust import LoadTestShape, events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from loadtests.report.series import Measures, Phase
from loadtests.run import Run, positive
from loadtests.scenarios.open_loop import Arrivals

__all__ = ["Arrivals", "Spike"]

_RUN_TIME_S = 60.0
_AT_ONCE = 100.0
_PROBE_S = 5.0


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument
    add("--spike", type=positive, default=2.0, help="times the server's speed, or --rate, during the spike")
    add("--calm", type=positive, default=0.5, help="share of the server's speed before and after the spike")
    add("--probe", type=int, default=64, help="requests at a time that measure the server's speed, without --rate")
    parser.set_defaults(rate=None)


def _speed(environment: Environment) -> float:
    """Requests a second with so many at a time, of which nothing stays in the run's figures."""
    run = Run.of(environment)
    Arrivals.host = Arrivals.host or run.settings.host  # Locust sets it with the first users
    user, probes = Arrivals(environment), Group()
    began = time.perf_counter()

    def ask() -> int:
        answered = 0
        while time.perf_counter() - began < _PROBE_S:
            answered += user.request() is not None
        return answered

    workers = [probes.spawn(ask) for _ in range(max(1, run.settings.probe))]
    gevent.joinall(workers)
    answered = sum(int(worker.value or 0) for worker in workers)
    seconds = time.perf_counter() - began
    run.measures = Measures()
    environment.stats.reset_all()
    environment.stats.clear_all()
    if not answered:
        raise SystemExit(f"--host {run.settings.host}: no request was answered within {_PROBE_S:g} s of a probe")
    return answered / seconds


class Spike(LoadTestShape):
    """As many sources as -u says; in the second third of the run, as many times as many as the spike is of the calm."""

    use_common_options = True
    _seconds = 0.0
    _factor = 1.0

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        run = Run.of(self.runner.environment)
        if not run.phases:
            self._begin(run)
        users, stage = run.settings.num_users or 1, int(self.get_run_time() // (self._seconds / 3))
        if stage > 2:
            return None
        return max(1, round(users * self._factor)) if stage == 1 else users, _AT_ONCE

    def _begin(self, run: Run) -> None:
        """Measure the server's speed where no rate is given, and share out what is left of the time. Workers get the
        settings with their users."""
        settings, began = run.settings, time.monotonic()
        self._factor = settings.spike
        if settings.rate is None:
            speed = _speed(run.environment)
            settings.rate = speed * settings.calm / (settings.num_users or 1)
            self._factor = settings.spike / settings.calm
            spike = f"{speed * settings.spike:.3g} in the spike"
            print(f"the server answers {speed:.3g} requests/s: {speed * settings.calm:.3g} in the calm, {spike}")
        self._seconds = (settings.run_time or _RUN_TIME_S) - (time.monotonic() - began)
        if self._seconds <= 0:
            raise SystemExit(f"-t {settings.run_time}: the probe alone took {_PROBE_S:g} s; give more, or --rate")
        self.reset_time()
        now, third = time.time(), self._seconds / 3
        names = ("calm", "spike", "after")
        run.phases = [Phase(name, now + i * third, now + (i + 1) * third) for i, name in enumerate(names)]
