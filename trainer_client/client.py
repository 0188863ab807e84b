"""The asynchronous client of a rollout URL: completions as they end, and weight calls.

Each prompt is its own request, with its own end, failure, retry and cancellation. The gateway's cost is about that of a
single stream for all prompts, which has none of these (docs/design/rollouts.md).
"""

import asyncio
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from engines.errors import (
    ConfigError,
    DeadlineExceeded,
    GatewayUnreachable,
    InvalidRequest,
    RolloutGatewayError,
)
from trainer_client.batch import Batch, Failures
from trainer_client.http import GatewayHttp, Json
from trainer_client.results import Rollout, ServedWeights, read_rollout
from trainer_client.retries import Retries, now
from trainer_client.sampling import SamplingParams

URL_VARIABLE = "ROLLOUT_URL"
KEY_VARIABLE = "ROLLOUT_API_KEY"

Prompt = str | Sequence[int] | Any
"""Text, or token ids: a list, or an array or tensor with one dimension."""

_Prompts = Annotated[list[str | list[int]], msgspec.Meta(min_length=1)]
_COMPLETIONS = "/v1/completions"
_LOOK_S = 0.5
_CALL_TIMEOUT_S = 30.0


class RolloutClient:
    """Asynchronous client of one gateway; `BlockingRolloutClient` is the same for a trainer without an event loop.

    url, api_key: default to the variables ROLLOUT_URL and ROLLOUT_API_KEY; the key is sent as bearer.
    model: default: the policy.
    max_in_flight: limit on concurrent prompts, each on its own connection; should cover the engines' `max_num_seqs`.
    attempts: tries per prompt that was answered with 502 or 504.
    outage_s: time to retry for while the gateway is not reached or answers 503; longer than its restart takes.

    Calls that are answered 429 wait as long as Retry-After says, and are retried until their time is over.

    Raises the gateway's errors, classes of engines/errors.py. A client needs a running event loop, and belongs to the
    loop of its first call.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        model: str | None = None,
        max_in_flight: int = 512,
        attempts: int = 5,
        outage_s: float = 180.0,
    ) -> None:
        for name, value in (("max_in_flight", max_in_flight), ("attempts", attempts)):
            if value < 1:
                raise InvalidRequest(f"{name} = {value!r} must be at least 1", param=name)
        self.url = _checked_url(url or os.environ.get(URL_VARIABLE, ""))
        self._http = GatewayHttp(self.url, api_key if api_key is not None else os.environ.get(KEY_VARIABLE, ""))
        self._model = model
        self._attempts = attempts
        self._outage_s = outage_s
        self._room = asyncio.Semaphore(max_in_flight)
        self._batches: list[Batch] = []

    async def close(self) -> None:
        """Cancel running batches and drop the connections."""
        await asyncio.gather(*(batch.aclose() for batch in self._batches))
        await self._http.close()

    async def __aenter__(self) -> "RolloutClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        min_version: int | None = None,
        max_staleness: int | None = None,
        sessions: Sequence[str] | None = None,
        timeout_s: float = 3600.0,
        failures: Failures = "raise",
    ) -> Batch:
        """Start `sampling.n` completions of each prompt, and return at once.

        min_version: the oldest weight version allowed.
        max_staleness: the largest lag behind the newest version at the start; during an update that is the target
        version.
        sessions: the conversation id of each prompt; turns of a conversation go to one replica.
        timeout_s: limit on every prompt from now on; a late prompt fails with `DeadlineExceeded`.
        """
        sampling = sampling or SamplingParams()
        checked = _checked_prompts(prompts)
        of_prompts = _checked_sessions(sessions, len(checked))
        asked = {"model": self._model, "min_version": min_version, "max_staleness": max_staleness}
        rest = sampling.body() | {key: value for key, value in asked.items() if value is not None}
        request_id = uuid.uuid4().hex
        deadline = asyncio.get_running_loop().time() + timeout_s

        async def run(index: int) -> Rollout:
            names = {"X-Request-Id": f"{request_id}-{index}", "X-Session-ID": of_prompts[index]}
            headers = {name: value for name, value in names.items() if value}
            return await self._rollout(index, {"prompt": [checked[index]], **rest}, headers, timeout_s, deadline)

        batch = Batch(len(checked), run, failures)
        self._batches = [other for other in self._batches if not other.is_done] + [batch]
        return batch

    async def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Wait for a complete, serving fleet. Raise `DeadlineExceeded`, which lists missing replicas."""
        loop = asyncio.get_running_loop()
        deadline, seen = loop.time() + timeout_s, "no answer"
        while (left := deadline - loop.time()) > 0:
            try:
                answer = await self._http.answer("GET", "/health", timeout_s=min(left, _CALL_TIMEOUT_S))
            except GatewayUnreachable as error:
                seen = str(error)
            except DeadlineExceeded as error:
                if left >= _CALL_TIMEOUT_S:  # the end of the wait cut off a shorter one, which says nothing
                    seen = str(error)
            else:
                if answer.status == 200:
                    return
                if answer.status < 500:
                    raise answer.error
                seen = _states(answer.body)
            await asyncio.sleep(min(_LOOK_S, max(0.0, deadline - loop.time())))
        raise DeadlineExceeded(f"{self.url} is not ready after {timeout_s:g} s: {seen}")

    async def call(self, method: str, path: str, body: Json | None = None, timeout_s: float = _CALL_TIMEOUT_S) -> Json:
        """Call any route, such as POST /pause?mode=keep, and return its reply. A POST is made again only if it cannot
        have arrived: a second one would wait for a broadcast that is over."""
        limit_s, is_again = min(timeout_s, self._outage_s), method != "POST"
        retries = Retries(1, limit_s, timeout_s, now() + timeout_s, is_again=is_again)
        return await retries.run(lambda left_s: self._http.call(method, path, body, timeout_s=left_s))

    async def status(self) -> Json:
        """Return the gateway's /status: replicas with their states, queues, the weight version."""
        return await self.call("GET", "/status")

    async def weight_version(self, timeout_s: float = _CALL_TIMEOUT_S) -> int:
        """Return the served weight version."""
        return int((await self.call("GET", "/weight_info", timeout_s=timeout_s))["weight_version"])

    async def served_weights(self) -> ServedWeights:
        """Return the policy's weights, as the engines hold them."""
        return msgspec.convert(await self.call("GET", "/v1/weights"), ServedWeights)

    async def canary_token_ids(self) -> list[int]:
        """Return the canary tokens, whose log-probs by the trainer's new weights `WeightSender.push` takes."""
        return list((await self.call("GET", "/v1/weight_canary"))["token_ids"])

    async def _rollout(
        self, index: int, body: Json, headers: dict[str, str], timeout_s: float, deadline: float
    ) -> Rollout:
        """Return one prompt's completions from the first successful attempt. Raises the last attempt's error with this
        prompt's index: its request had one prompt."""
        where, retries = f"prompt[{index}]", Retries(self._attempts, self._outage_s, timeout_s, deadline)

        async def ask(_: float) -> Rollout:
            reply = await self._http.call("POST", _COMPLETIONS, body, timeout_s=None, headers=headers)
            return read_rollout(reply, index, body["n"])

        try:
            async with asyncio.timeout_at(deadline), self._room:
                return await retries.run(ask)
        except RolloutGatewayError as error:
            message = str(error).replace("prompt[0]", where)
            tried = f" (after {retries.made} attempts)" if retries.made > 1 else ""
            error.args = (("" if where in message else f"{where}: ") + message + tried,)
            raise
        except TimeoutError as error:
            asked = (f"{key} = {body[key]}" for key in ("min_version", "max_staleness") if key in body)
            demands = "".join(f"; it requires {demand}" for demand in asked)
            met = f"; the attempt before it: {retries.last}" if retries.last else ""
            raise DeadlineExceeded(f"{where}: no completions within timeout_s = {timeout_s:g}{demands}{met}") from error


def _checked_url(url: str) -> str:
    if not url:
        raise ConfigError(f"no rollout URL: give url, or set {URL_VARIABLE}, such as http://127.0.0.1:8100")
    if "@" in url:  # not shown: it holds a password
        raise ConfigError(
            f"url, or {URL_VARIABLE}, holds a user or password (an '@'): give the key as api_key, or set {KEY_VARIABLE}"
        )
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"url = {url!r} must begin with http:// or https://")
    return url.rstrip("/")


def _checked_prompts(prompts: Sequence[Prompt]) -> list[str | list[int]]:
    """Return the prompts as JSON can hold them."""
    try:
        # A mapping, such as a tokenizer's, would be read as its keys.
        plain = prompts if isinstance(prompts, str | Mapping) else list(map(_plain, prompts))
        checked: list[str | list[int]] = msgspec.convert(plain, _Prompts)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(
            f"prompts is {prompts!r:.80}: give a list of texts, or of flat sequences of whole numbers ({error})",
            param="prompts",
        ) from None
    return checked


def _plain(prompt: Prompt) -> Any:
    if hasattr(prompt, "tolist"):
        return prompt.tolist()
    return list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes) else prompt


def _checked_sessions(sessions: Sequence[str] | None, num_prompts: int) -> Sequence[str]:
    if sessions is not None and len(sessions) != num_prompts:
        raise InvalidRequest(f"sessions has {len(sessions)} ids for {num_prompts} prompts", param="sessions")
    return sessions or [""] * num_prompts


def _states(body: Any) -> str:
    """Return the replica states in the body of a failed /health."""
    if not isinstance(body, dict) or "replicas" not in body:
        return f"/health says {str(body)[:200]}"
    states = [
        f"{replica['replica_id']} {replica['state']}" + (f" ({reason})" if (reason := replica.get("reason")) else "")
        for replica in body["replicas"]
    ]
    return f"{len(states)} of {body.get('replicas_expected')} replicas are there: {', '.join(states) or 'none'}"
