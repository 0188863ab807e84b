"""Locust users that behave as trainers: one batch of prompts x samples, wait for all of it, then the next.

    locust -f loadtests/locustfile.py --headless -u 1 -t 60s --stop-timeout 600 --host URL \
        --prompts 64 --samples 8 --csv out/load --html out/load.html

The stop timeout lets the batch in flight come to its end, which would be lost otherwise. Two rows of their own tell
what a trainer cares for: `makespan` in milliseconds, and `tokens per second`, whose "response time" is that number.
They count into Locust's "Aggregated" row, which therefore means nothing here.
"""

import itertools
import time
from typing import Any

import gevent
import orjson
from locust import FastHttpUser, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.stats import CSV_STATS_INTERVAL_SEC

from loadtests.replies import check_reply, read_reply
from loadtests.workloads import LengthMix, Workload

_PATH = "/v1/completions"
_ROW = "BATCH"
_MAKESPAN = "makespan"
_SPEED = "tokens per second"


@events.init_command_line_parser.add_listener
def add_settings(parser: LocustArgumentParser) -> None:
    add = parser.add_argument
    add("--prompts", type=int, default=64, help="prompts of a batch")
    add("--samples", type=int, default=8, help="completions of a prompt")
    add("--prompt-tokens", default="256", help="length of a prompt: 256, or a mix: 128*3,1024*1")
    add("--max-tokens", type=int, default=256, help="tokens of a completion")
    add("--model", default="", help="name to ask for; the server's own unless given")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--batch-timeout", type=float, default=1800.0, help="longest wait for a batch, in seconds")
    add("--api-key", default="", env_var="ROLLOUT_GATEWAY_KEY", is_secret=True, help="bearer key")


class Trainer(FastHttpUser):
    """A closed loop: the next batch begins when the last completion of this one is there."""

    wait_time = constant(0)
    numbers = itertools.count()

    def __init__(self, environment: Environment) -> None:
        settings = environment.parsed_options
        assert settings is not None
        # Locust's own bound of a minute would end long batches.
        self.network_timeout = settings.batch_timeout
        super().__init__(environment)
        self._workload = Workload(
            prompts=settings.prompts,
            samples=settings.samples,
            prompt_tokens=LengthMix.parse(settings.prompt_tokens),
            max_tokens=settings.max_tokens,
            model=settings.model,
        )
        # Two users with equal prompts would be answered from each other's prefix cache.
        worker = getattr(environment.runner, "worker_index", 0)
        self._seed = f"{settings.seed} {worker} {next(self.numbers)}"
        self._batches = itertools.count()
        self._headers = {"Content-Type": "application/json"}
        if settings.api_key:
            self._headers["Authorization"] = f"Bearer {settings.api_key}"

    @task
    def batch(self) -> None:
        body = orjson.dumps(self._workload.request(f"{self._seed} {next(self._batches)}")).decode()
        began = time.perf_counter()
        with self.client.post(_PATH, data=body, headers=self._headers, catch_response=True) as response:
            seconds = time.perf_counter() - began
            tokens, error = self._delivered(response)
            if error is not None:
                response.failure(error)
        self._record(_MAKESPAN, seconds * 1000, tokens, error)
        if error is None:
            self._record(_SPEED, tokens / seconds, tokens, None)

    def _delivered(self, response: Any) -> tuple[int, Exception | None]:
        content = response.content or b""
        if response.status_code != 200:
            return 0, response.error or ValueError(f"status {response.status_code}: {content[:300]!r}")
        try:
            delivered = read_reply(content, stream=False)
            check_reply(delivered, self._workload)
        except (ValueError, KeyError) as error:
            return 0, error
        return delivered.tokens, None

    def _record(self, name: str, value: float, tokens: int, error: Exception | None) -> None:
        self.environment.events.request.fire(
            request_type=_ROW, name=name, response_time=value, response_length=tokens, exception=error, context={}
        )


@events.quitting.add_listener
def conclude(environment: Environment, **_: Any) -> None:
    """The run in one line; a failed batch, or none at all, fails the run."""
    stats = environment.stats.get(_MAKESPAN, _ROW)
    batches = stats.num_requests - stats.num_failures
    seconds = (stats.last_request_timestamp or 0) - stats.start_time
    speed = stats.total_content_length / seconds if batches and seconds > 0 else 0.0
    p50, p99 = (stats.get_response_time_percentile(share) / 1000 for share in (0.5, 0.99))
    print(
        f"{batches} batches, {stats.num_failures} failed, {stats.total_content_length} tokens, {speed:.0f} tokens/s, "
        f"makespan p50 {p50:.2f} s, p99 {p99:.2f} s"
    )
    if stats.num_failures or not batches:
        environment.process_exit_code = 1
    if environment.parsed_options and environment.parsed_options.csv_prefix:
        # The writer of the CSV files looks at the numbers once in a while and not at the end: let it see the last ones.
        gevent.sleep(1.1 * CSV_STATS_INTERVAL_SEC)
