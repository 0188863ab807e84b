"""Users that behave as synchronous trainers: a batch of prompts x samples, wait for all of it, then the next.

    locust -f loadtests/scenarios/trainer.py --headless -u 1 -t 60s --stop-timeout 600 --host URL \
        --prompts 64 --samples 8 --csv out/load --html out/load.html

The stop timeout lets the batch in flight come to its end, which would be lost otherwise.
"""

import time
from typing import Any

import gevent
from locust import constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopTest

import loadtests.beside  # weight updates
import loadtests.report.conclusion  # noqa: F401  # how it ends
from loadtests.caller import Caller
from loadtests.report.timeline import Timeline, tail_ratio
from loadtests.workloads import completion_request, random_tokens

_WAYS = {
    "batch": "in one streamed request",
    "whole": "in one request with one reply at its end, as TRL does",
    "prompt": "prompt by prompt, as RolloutClient does",
}


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument
    add("--prompts", type=int, default=64, help="prompts of a batch")
    add("--samples", type=int, default=8, help="completions of a prompt")
    ways = "; ".join(f"{way}: {meaning}" for way, meaning in _WAYS.items())
    add("--ask", choices=list(_WAYS), default="batch", help=f"how a batch is asked for. {ways}")


class Trainer(Caller):
    """A closed loop: the next batch begins when the last completion of this one is there."""

    wait_time = constant(0)

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        if not self.completion_lengths.is_one and self.settings.ask != "prompt":
            raise StopTest(
                f"--max-tokens {self.settings.max_tokens} is a mix, and the prompts of one request share one length: "
                "use --ask prompt"
            )

    @task
    def batch(self) -> None:
        parts_of_it = self._parts()
        began, began_at = time.perf_counter(), time.time()
        asked = [gevent.spawn(self._ask, prompts, max_tokens) for prompts, max_tokens in parts_of_it]
        try:
            gevent.joinall(asked)
        finally:
            gevent.killall(asked)
        makespan_s = time.perf_counter() - began
        parts = [greenlet.value for greenlet in asked]
        record = self.load_run.record
        if any(part is None for part in parts):
            record("failed_batch_s", makespan_s, at=began_at)
            return
        record("makespan_s", makespan_s, at=began_at)
        if (ratio := tail_ratio(parts, began)) is not None:
            record("tail_ratio", ratio, at=began_at)

    def _parts(self) -> list[tuple[list[Any], int]]:
        """Return the prompts of each request of a batch, and the length of their completions."""
        draw, settings = self.draw, self.settings
        prompts = [random_tokens(draw, length) for length in self.prompt_lengths.drawn(draw, settings.prompts)]
        if settings.ask == "prompt":
            limits = self.completion_lengths.drawn(draw, len(prompts))
            return [([prompt], limit) for prompt, limit in zip(prompts, limits, strict=True)]
        return [(prompts, self.completion_lengths.lengths[0])]

    def _ask(self, prompts: list[Any], max_tokens: int) -> Timeline | None:
        samples = self.settings.samples
        sampling = {"n": samples, "max_tokens": max_tokens, "ignore_eos": True}
        stream = self.settings.ask != "whole"
        body = completion_request(prompts, sampling, model=self.settings.model, stream=stream)
        completions = len(prompts) * samples
        return self.ask(body, completions=completions, tokens=completions * max_tokens)
