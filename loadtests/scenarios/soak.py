"""A soak: trainers, agents and single requests together for hours, with weight updates. Does anything drift or leak?

    locust -f loadtests/scenarios/soak.py --headless -u 6 -t 4h --stop-timeout 600 --host URL \
        --update-every 60 --weights CHECKPOINT --watch-pid GATEWAY_PID

Users join over the first tenth of the run; the rest is reported in thirds, and `drift` is the last third by
the first. The memory of `--watch-pid` is measured each second.
"""

import time

from locust import LoadTestShape

from loadtests.report.series import Phase
from loadtests.run import Run
from loadtests.scenarios.agents import Agent
from loadtests.scenarios.open_loop import Arrivals
from loadtests.scenarios.trainer import Trainer

__all__ = ["Agent", "Arrivals", "Soak", "Trainer"]

_RUN_TIME_S = 3600.0
_LEAST_USERS = 3


class Soak(LoadTestShape):
    """A slow start, then as many users as -u says, a third of each kind."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        run = Run.of(self.runner.environment)
        seconds = run.settings.run_time or _RUN_TIME_S
        if not run.phases:
            third, began = 0.3 * seconds, time.time() - self.get_run_time() + 0.1 * seconds
            names = ("first", "middle", "last")
            run.phases = [Phase(name, began + i * third, began + (i + 1) * third) for i, name in enumerate(names)]
        if self.get_run_time() > seconds:
            return None
        users = max(_LEAST_USERS, run.settings.num_users or 0)
        return users, max(1.0, users / (0.1 * seconds))
