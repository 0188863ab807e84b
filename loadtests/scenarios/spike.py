"""A spike: arrivals at a steady rate, suddenly many times as many, then as before. Does it come back, and how soon?

    locust -f loadtests/scenarios/spike.py --headless -u 2 -t 90s --stop-timeout 60 --host URL --rate 2 --spike 8

Each third of the run is reported by itself: `calm`, `spike`, `after`.
"""

import time

from locust import LoadTestShape, events
from locust.argument_parser import LocustArgumentParser

from loadtests.report.series import Phase
from loadtests.run import Run
from loadtests.scenarios.open_loop import Arrivals

__all__ = ["Arrivals", "Spike"]

_RUN_TIME_S = 60.0
_AT_ONCE = 100.0


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--spike", type=float, default=5.0, help="times the arrivals during the spike")


class Spike(LoadTestShape):
    """As many sources as -u says; in the second third of the run, `--spike` times as many."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        run = Run.of(self.runner.environment)
        third = (run.settings.run_time or _RUN_TIME_S) / 3
        if not run.phases:
            now = time.time() - self.get_run_time()
            names = ("calm", "spike", "after")
            run.phases = [Phase(name, now + i * third, now + (i + 1) * third) for i, name in enumerate(names)]
        users, stage = run.settings.num_users or 1, int(self.get_run_time() // third)
        if stage > 2:
            return None
        return (round(users * run.settings.spike) if stage == 1 else users), _AT_ONCE
