"""Users that behave as agents: turns that share a growing prefix, a tool at work between them, one session each time.

    locust -f loadtests/scenarios/agents.py --headless -u 32 -t 60s --stop-timeout 60 --host URL --turns 4*3,12*1

A turn's prompt is all that was said before and what a tool has added. The session's name goes along as X-Session-ID.
"""

import sys
import time
import uuid
from typing import Any

import gevent
from locust import constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

import loadtests.beside  # weight updates
import loadtests.report.conclusion  # noqa: F401  # how it ends
from loadtests.caller import Caller
from loadtests.report.timeline import Timeline
from loadtests.run import checked
from loadtests.workloads import LengthMix, completion_request, random_tokens


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument
    add("--turns", type=checked(LengthMix.parse), default="4", help="turns of a session: 4, or a mix: 4*3,12*1")
    add(
        "--tool-tokens",
        type=checked(LengthMix.parse),
        default="64",
        help="tokens that a tool adds between turns, or a mix of lengths",
    )
    add("--tool-gap", type=float, default=0.5, help="mean seconds that a tool takes, exponentially distributed")
    add("--shared-tokens", type=int, default=0, help="tokens that all sessions begin with, as a system prompt")
    add("--max-context", type=int, default=0, help="tokens at which a session ends early; 0 for no limit")


@events.init.add_listener
def refuse_empty_sessions(environment: Environment, **_: Any) -> None:
    """Ends the run where the first turn of a session may not fit --max-context: such sessions would be empty."""
    settings = environment.parsed_options
    if settings is None or not settings.max_context:
        return
    longest = [max(LengthMix.parse(text).lengths) for text in (settings.prompt_tokens, settings.max_tokens)]
    first = settings.shared_tokens + sum(longest)
    if settings.max_context < first:
        sys.exit(
            f"--max-context {settings.max_context}: the first turn takes up to {first} tokens (shared, prompt and "
            f"completion), and a session would have none; give {first} or more"
        )


class Agent(Caller):
    """One session after the other."""

    wait_time = constant(0)

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._turns = LengthMix.parse(self.settings.turns)
        self._tool_tokens = LengthMix.parse(self.settings.tool_tokens)

    @task
    def session(self) -> None:
        began, began_at, name = time.perf_counter(), time.time(), uuid.uuid4().hex
        [length] = self.prompt_lengths.drawn(self.draw, 1)
        context = [7] * self.settings.shared_tokens + random_tokens(self.draw, length)
        [turns] = self._turns.drawn(self.draw, 1)
        for turn in range(turns):
            [max_tokens] = self.completion_lengths.drawn(self.draw, 1)
            limit = self.settings.max_context
            if limit and len(context) + max_tokens > limit:
                break
            timeline = self._turn(name, turn, context, max_tokens)
            if timeline is None or not self.goes_on:
                return  # a session that failed, or that the end of the run cut short, has no length to tell of
            context += timeline.completions[0].token_ids
            if turn < turns - 1:
                gevent.sleep(self.draw.expovariate(1 / self.settings.tool_gap) if self.settings.tool_gap else 0)
                [added] = self._tool_tokens.drawn(self.draw, 1)
                context += random_tokens(self.draw, added)
        self.load_run.record("session_s", time.perf_counter() - began, at=began_at)

    def _turn(self, session: str, turn: int, context: list[int], max_tokens: int) -> Timeline | None:
        sampling = {"n": 1, "max_tokens": max_tokens, "ignore_eos": True}
        body = completion_request(context, sampling, model=self.settings.model, stream=True)
        began, began_at = time.perf_counter(), time.time()
        timeline = self.ask(body, tokens=max_tokens, session=session)
        if timeline is None:
            return None
        record = self.load_run.record
        record("later_turn_s" if turn else "first_turn_s", time.perf_counter() - began, at=began_at)
        if turn and (details := timeline.usage.get("prompt_tokens_details")):
            record("cached_share", (details.get("cached_tokens") or 0) / len(context), at=began_at)
        return timeline
