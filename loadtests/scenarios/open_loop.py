"""Requests that arrive whether or not the ones before are answered, as users of a service do: Poisson arrivals.

    locust -f loadtests/scenarios/open_loop.py --headless -u 4 -t 60s --stop-timeout 60 --host URL --rate 2.5

Each Locust user is a source of `--rate` arrivals a second, so that 4 users of 2.5 make 10. A reply is timed from when
its request was due, not from when it was sent: a load generator that falls behind, or waits for a slow server, would
leave out the very requests that had to wait (coordinated omission). `lateness` is its delay behind the schedule.
"""

import time

import gevent
from gevent.pool import Group
from locust import constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

import loadtests.beside  # weight updates
import loadtests.report.conclusion  # noqa: F401  # how it ends
from loadtests.caller import Caller
from loadtests.report.timeline import Timeline
from loadtests.run import positive
from loadtests.workloads import completion_request, random_tokens


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--rate", type=positive, default=1.0, help="arrivals a second from each user")


class OpenLoop(Caller):
    """Does not wait for answers: requests are spawned in `_asked`."""

    abstract = True
    wait_time = constant(0)

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._asked = Group()

    def on_stop(self) -> None:
        """Let those that were sent have their answers, as long as Locust waits."""
        try:
            self._asked.join()
        finally:
            self._asked.kill()


class Arrivals(OpenLoop):
    """A Poisson source. The sum of many is one too."""

    def on_start(self) -> None:
        self._due = time.perf_counter()

    @task
    def arrive(self) -> None:
        self._due += self.draw.expovariate(self.settings.rate)
        gevent.sleep(max(0.0, self._due - time.perf_counter()))
        if self.goes_on:
            self._asked.spawn(self._arrived, self._due)

    def _arrived(self, due: float) -> None:
        self.load_run.record("lateness_s", time.perf_counter() - due)
        self.request(due)

    def request(self, due: float | None = None) -> Timeline | None:
        """Send one request, timed from when it was due; return its reply, None if it failed."""
        [length] = self.prompt_lengths.drawn(self.draw, 1)
        [max_tokens] = self.completion_lengths.drawn(self.draw, 1)
        sampling = {"n": 1, "max_tokens": max_tokens, "ignore_eos": True}
        prompt = random_tokens(self.draw, length)
        body = completion_request(prompt, sampling, model=self.settings.model, stream=True)
        return self.ask(body, tokens=max_tokens, intended=due)
