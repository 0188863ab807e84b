"""A Locust user that asks for completions and measures every token that comes: what all scenarios are made of."""

import itertools
import random
import time
from typing import Any

import gevent
import orjson
from locust import FastHttpUser
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS
from locust.env import Environment
from locust.runners import STATE_RUNNING, STATE_SPAWNING

from loadtests.report.timeline import Timeline
from loadtests.run import Run
from loadtests.workloads import Json, LengthMix

PATH = "/v1/completions"

# Bounds nothing that is meant: a batch may be asked for prompt by prompt, and arrivals wait for nobody.
_CONNECTIONS = 100_000
_FAILURE_SHOWN = 300


class Caller(FastHttpUser):
    """Asks, reads, records. No two callers have the same prompts: they would be answered from each other's cache."""

    abstract = True
    concurrency = _CONNECTIONS
    _numbers = itertools.count()

    def __init__(self, environment: Environment) -> None:
        self.load_run = Run.of(environment)
        self.settings = settings = self.load_run.settings
        # Locust's own bound of a minute would end long batches.
        self.network_timeout = self.connection_timeout = settings.request_timeout
        super().__init__(environment)
        worker = getattr(environment.runner, "worker_index", 0)
        self.seed = f"{settings.seed} {worker} {next(Caller._numbers)}"
        self.draw = random.Random(self.seed)
        self.prompt_lengths = LengthMix.parse(settings.prompt_tokens)
        self.completion_lengths = LengthMix.parse(settings.max_tokens)
        self._headers = {"Content-Type": "application/json"}
        if settings.api_key:
            self._headers["Authorization"] = f"Bearer {settings.api_key}"

    @property
    def goes_on(self) -> bool:
        """False from when the run is being stopped."""
        return self.environment.runner is None or self.environment.runner.state in (STATE_RUNNING, STATE_SPAWNING)

    def ask(
        self,
        body: Json,
        *,
        completions: int = 1,
        tokens: int | None = None,
        session: str = "",
        intended: float | None = None,
        name: str = PATH,
    ) -> Timeline | None:
        """The timeline of a whole reply, its measures recorded; None where the request failed, which is recorded too.

        `completions` and, where known, `tokens` have to come. `intended` is when the request was meant to be sent, on
        the clock of `time.perf_counter`: what it is late by counts as waiting.
        """
        sent, sent_at = time.perf_counter(), time.time()
        began = sent if intended is None else intended
        arrived_at = sent_at - (sent - began)
        timeline, headers = Timeline(), self._headers | ({"X-Session-ID": session} if session else {})
        with self.client.post(
            PATH, data=orjson.dumps(body).decode(), headers=headers, name=name, stream=True, catch_response=True
        ) as response:
            error = self._read(response, timeline, completions, tokens)
            seconds = time.perf_counter() - began
            # Locust's own time ends with the headers.
            response.request_meta |= {"response_time": 1000 * seconds, "response_length": timeline.tokens}
            if error is not None:
                response.failure(error)
        if error is not None:
            self.load_run.record("failed_s", seconds, at=arrived_at)
            return None
        self._record(timeline, began, arrived_at)
        return timeline

    def _read(self, response: Any, timeline: Timeline, completions: int, tokens: int | None) -> Exception | None:
        """What is wrong with the reply, if anything is."""
        bound_s = self.settings.request_timeout
        try:
            with gevent.Timeout(bound_s):
                _follow(response, timeline)
        except gevent.Timeout:
            return TimeoutError(f"no whole reply within {bound_s:g} s (--request-timeout)")
        except (ValueError, KeyError, TypeError, *FAILURE_EXCEPTIONS) as error:
            return error
        if not timeline.is_whole:
            return ValueError(f"the reply broke off after {timeline.tokens} tokens")
        # A run that lost some has no speed to tell of.
        if timeline.ended != completions:
            return ValueError(f"{timeline.ended} completions came, {completions} were asked for")
        if tokens is not None and timeline.tokens != tokens:
            return ValueError(f"{timeline.tokens} tokens came, {tokens} were asked for")
        return None

    def _record(self, timeline: Timeline, began: float, at: float) -> None:
        record = self.load_run.record
        for second, tokens in timeline.tokens_by_second.items():
            record("tokens", tokens, at=max(second, at))
        for times in timeline.completions.values():
            record("completion_s", (times.ended or times.last) - began, at=at)
            record("completion_tokens", times.tokens, at=at)
            if not timeline.is_streamed:
                continue
            record("ttft_s", times.first - began, at=at)
            if times.tpot_s is not None:
                record("tpot_s", times.tpot_s, at=at)
                record("longest_gap_s", times.longest_gap_s, at=at)


def _follow(response: Any, timeline: Timeline) -> None:
    """Read a reply as it comes, event by event."""
    if response.status_code != 200:
        content = response.content or b""
        raise ValueError(f"status {response.status_code}: {bytes(content[:_FAILURE_SHOWN])!r} {response.error or ''}")
    if "event-stream" not in (response.headers or {}).get("content-type", ""):
        timeline.feed_whole(bytes(response.content or b""), time.perf_counter(), time.time())
        return
    # Not read(4096) nor iter_lines: they wait for a full block, and tell of the first token when the last is there.
    while line := response.stream.readline(b"\n"):
        timeline.feed(bytes(line), time.perf_counter(), time.time())
