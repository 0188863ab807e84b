"""The Locust user of all scenarios: requests completions and times every token."""

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

# High enough to be no limit for batches sent prompt by prompt and for open-loop arrivals.
_CONNECTIONS = 100_000
_FAILURE_SHOWN = 300
_AFTER_NO_ANSWER_S = 1.0


class Caller(FastHttpUser):
    """Requests, reads and records. Callers have different prompts, so that none is answered from the prefix cache."""

    abstract = True
    concurrency = _CONNECTIONS
    _numbers = itertools.count()

    def __init__(self, environment: Environment) -> None:
        self.load_run = Run.of(environment)
        self.settings = settings = self.load_run.settings
        # Locust's default of a minute would end long batches.
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
        """False once the run is being stopped."""
        return self.environment.runner is None or self.environment.runner.state in (STATE_RUNNING, STATE_SPAWNING)

    def ask(
        self,
        body: Json,
        *,
        completions: int = 1,
        tokens: int | None = None,
        session: str = "",
        intended: float | None = None,
    ) -> Timeline | None:
        """Send a request; return the timeline of its complete reply, None if it failed. Both are recorded.

        The reply must have `completions` and, unless None, `tokens`. `intended` is the planned time on the clock of
        `time.perf_counter`; lateness counts as waiting.
        """
        sent, sent_at = time.perf_counter(), time.time()
        began = sent if intended is None else intended
        arrived_at = sent_at - (sent - began)
        timeline, headers = Timeline(), self._headers | ({"X-Session-ID": session} if session else {})
        with self.client.post(
            PATH, data=orjson.dumps(body).decode(), headers=headers, name=PATH, stream=True, catch_response=True
        ) as response:
            error = self._read(response, timeline, completions, tokens)
            seconds = time.perf_counter() - began
            # Locust's time ends with the headers.
            response.request_meta |= {"response_time": 1000 * seconds, "response_length": timeline.tokens}
            if error is not None:
                response.failure(error)
        if error is not None:
            self.load_run.record("failed_s", seconds, at=arrived_at)
            if isinstance(error, FAILURE_EXCEPTIONS):
                gevent.sleep(_AFTER_NO_ANSWER_S)  # a server that is gone gets no storm of requests
            return None
        self._record(timeline, began, arrived_at)
        return timeline

    def _read(self, response: Any, timeline: Timeline, completions: int, tokens: int | None) -> Exception | None:
        """Read the reply; return its error, if any."""
        bound_s = self.settings.request_timeout
        try:
            with gevent.Timeout(bound_s):
                _follow(response, timeline)
        except gevent.Timeout:
            return TimeoutError(f"no complete reply within {bound_s:g} s (--request-timeout)")
        except (ValueError, KeyError, TypeError, *FAILURE_EXCEPTIONS) as error:
            return error
        if not timeline.is_whole:
            return ValueError(f"the reply was interrupted after {timeline.tokens} tokens")
        # A run that lost completions has no valid speed.
        if timeline.ended != completions:
            return ValueError(f"{timeline.ended} completions came, {completions} were requested")
        if tokens is not None and timeline.tokens != tokens:
            return ValueError(f"{timeline.tokens} tokens came, {tokens} were requested")
        return None

    def _record(self, timeline: Timeline, began: float, at: float) -> None:
        record = self.load_run.record
        record("tokens", timeline.tokens, at=at)
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
    """Read a reply event by event, as it arrives."""
    if response.status_code != 200:
        content = response.content or b""
        raise ValueError(f"status {response.status_code}: {bytes(content[:_FAILURE_SHOWN])!r} {response.error or ''}")
    if "event-stream" not in (response.headers or {}).get("content-type", ""):
        timeline.feed_whole(bytes(response.content or b""), time.perf_counter())
        return
    # Not read(4096) or iter_lines: they wait for a full block, so the first token would appear with the last.
    while line := response.stream.readline(b"\n"):
        timeline.feed(bytes(line), time.perf_counter())
