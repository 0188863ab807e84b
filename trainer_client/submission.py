"""A submission of /v1/rollouts: completions as they end, each once, over broken connections and restarted gateways."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
from numpy.typing import NDArray

from engines.errors import (
    DeadlineExceeded,
    GatewayUnreachable,
    RolloutGatewayError,
    UnknownCursor,
    UnknownRoute,
)
from gateway.api import error_of
from trainer_client.http import PACKED, GatewayHttp, Json
from trainer_client.results import Completion, completion_of
from trainer_client.retries import Retries, now

PATH = "/v1/rollouts"
_ACK_EVERY_S = 1.0
_CALL_TIMEOUT_S = 30.0


class Submission:
    """Iterate its completions; `outcomes` and `failures` say how groups ended, by their place.

    `prompt_token_ids` (int32) has the prompts that an engine read from text, by place.

    Events up to the completion that the loop has come back from are acked, about once a second: a trainer that stores
    each completion in the body of its loop can restart with the same id and loses none.
    """

    def __init__(self, http: GatewayHttp, body: Json, *, timeout_s: float, attempts: int, outage_s: float) -> None:
        self.id: str = body.setdefault("id", uuid.uuid4().hex)
        self.outcomes: dict[int, str] = {}
        self.failures: dict[int, RolloutGatewayError] = {}
        self.prompt_token_ids: dict[int, NDArray[np.int32]] = {}
        self._http = http
        self._body = body
        self._timeout_s, self._attempts, self._outage_s = timeout_s, attempts, outage_s
        self._cursor: int | None = None
        self._acked_at = time.monotonic()
        self._seen: set[tuple[int, int]] = set()
        self._has_ended = False

    async def __aiter__(self) -> AsyncGenerator[Completion]:
        """Raise `DeadlineExceeded` after `timeout_s`, and the gateway's error where the submission is refused."""
        deadline = now() + self._timeout_s
        async with aclosing(self._events(deadline)) as events:
            async for event in events:
                completion = self._take(event)
                if completion is not None:
                    yield completion
                self._cursor = event["cursor"]
                if self._has_ended or time.monotonic() - self._acked_at > _ACK_EVERY_S:
                    await self._ack()

    async def cancel(self, groups: list[int] | None = None) -> None:
        """End groups that run; all unless named. Completions that ended before still come."""
        body = {} if groups is None else {"groups": groups}
        await self._http.call("DELETE", self._path, body, timeout_s=_CALL_TIMEOUT_S)

    @property
    def _path(self) -> str:
        return f"{PATH}/{quote(self.id, safe='')}"

    async def _events(self, deadline: float) -> AsyncGenerator[Json]:
        """Events after the cursor, from one connection after the other."""
        retries = Retries(self._attempts, self._outage_s, self._timeout_s, deadline)
        last: RolloutGatewayError | None = None
        try:
            while not self._has_ended:
                had_ended = False
                try:
                    async with aclosing(self._frames()) as frames:
                        while (event := await self._next(frames, deadline)) is not None:
                            retries.succeeded()
                            if event["type"] == "submission":
                                had_ended = event["ended"]
                            else:
                                had_ended = False  # the end is among the events that come
                                yield event
                    if had_ended:
                        return  # its end was acked before, and does not come again
                    if not self._has_ended:
                        raise GatewayUnreachable(f"the events of {self.id!r} broke off")
                except UnknownCursor:
                    self._cursor = None  # from the start of what is kept: what was seen is dropped
                except UnknownRoute:
                    if self._cursor is None:
                        raise
                    self._cursor = None  # the gateway has lost it: submitted again
                except RolloutGatewayError as error:
                    last = error
                    async with asyncio.timeout_at(deadline):
                        await retries.pause(error)
        except TimeoutError as error:
            met = f"; the last error: {last}" if last else ""
            raise DeadlineExceeded(f"{self.id!r} has not ended within timeout_s = {self._timeout_s:g}{met}") from error

    async def _next(self, frames: AsyncGenerator[Json], deadline: float) -> Json | None:
        async with asyncio.timeout_at(deadline):
            return await anext(frames, None)

    def _frames(self) -> AsyncGenerator[Json]:
        """The events of one connection. The POST joins what the gateway has of the id."""
        if self._cursor is None:
            body = msgspec.msgpack.encode(self._body)
            return self._http.packed("POST", PATH, body, {"Content-Type": PACKED})
        return self._http.packed("GET", f"{self._path}?cursor={self._cursor}")

    def _take(self, event: Json) -> Completion | None:
        if event["type"] == "sample":
            name = (event["group"], event["sample"])
            if name not in self._seen:
                self._seen.add(name)
                return read_completion(event)
        elif event["type"] == "group":
            self.outcomes[event["group"]] = event["outcome"]
            if "prompt_token_ids" in event:
                self.prompt_token_ids[event["group"]] = np.frombuffer(event["prompt_token_ids"], "<i4")
            if "error" in event:
                self.failures[event["group"]] = error_of(event["error"].get("code") or 500, event)
        else:
            self._has_ended = True
        return None

    async def _ack(self) -> None:
        """Free what was delivered. A lost ack costs memory until the next, and no completion."""
        self._acked_at = time.monotonic()
        with suppress(RolloutGatewayError):
            await self._http.call("POST", f"{self._path}/ack", {"cursor": self._cursor}, timeout_s=_CALL_TIMEOUT_S)


def read_completion(event: Mapping[str, Any]) -> Completion:
    """Return the completion in a sample's event. Its arrays are views of the event's bytes."""
    token_ids = np.frombuffer(event["token_ids"], "<i4")
    logprobs = None if event["logprobs"] is None else np.frombuffer(event["logprobs"], "<f4")
    return completion_of(event, event["group"], event["sample"], token_ids, logprobs)
