"""/inference/v1/generate of vLLM's dialect: token ids of one prompt in, token ids out, with their weight versions.

An engine that serves the route gets the body as it is; others take no such rollout.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msgspec import structs

from engines.engine import Json
from engines.errors import InvalidRequest, UnknownRoute
from gateway.dialects.resumption import rest_sampling
from gateway.dialects.runner import DEFAULT_MAX_TOKENS, Ask, Runner
from gateway.dialects.sample import Reply
from gateway.dialects.sampling import Terms, check_id, check_room, check_sampling, common_room, normalise_numbers
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.sessions import name_of_client
from gateway.fleet.replica import Replica

PATH = "/inference/v1/generate"

_REFUSED = ("kv_transfer_params", "ec_transfer_params")  # they tie a request to one engine
_MEDIA = ("features", "content_parts")  # images and sound as vLLM's route has them


class TokenGeneration:
    """Decodes a prompt of token ids and has replicas complete it."""

    def __init__(self, fleet: Fleet, runner: Runner) -> None:
        self._fleet = fleet
        self._runner = runner
        self.make = runner.run

    def decode(self, body: Json, request_id: str, session: str = "", client: str = "") -> "TokenPrompt":
        """Give the body its request's id where it has none. Raises `InvalidRequest` for fields that no engine would
        take."""
        for field in _REFUSED:
            if body.get(field):
                raise InvalidRequest(f"{field} is refused here: it ties a request to one engine", param=field)
        sampling = body.get("sampling_params")
        if not isinstance(sampling, dict):
            raise InvalidRequest(
                f"sampling_params is {type(sampling).__name__}: send an object, such as {{'max_tokens': 16}}",
                param="sampling_params",
            )
        normalise_numbers(sampling)
        asked = {"stream": body.get("stream"), "stream_options": body.get("stream_options")}
        n = check_sampling(sampling | asked)
        terms = Terms.take(body, self._fleet, self._runner.lengths)
        length = _checked_length(body.get("token_ids"), common_room(self._fleet, terms.model))
        given = body.get("request_id")
        body["request_id"] = request_id if given is None else check_id(given, "request_id")
        rollout = terms.rollout(
            name_of_client(client, body["request_id"]),  # engines refuse an id that runs
            body["token_ids"],
            n=n,
            prompt_tokens=length,
            limit=sampling.get("max_tokens") or DEFAULT_MAX_TOKENS,
            session=session,
        )
        return self.prompt(rollout, body)

    def prompt(self, rollout: Rollout, body: Json) -> "TokenPrompt":
        """A decoded body as what engines are asked."""
        return TokenPrompt(
            rollout=structs.replace(rollout, needs_route=PATH),
            body=body,
            limit=body["sampling_params"].get("max_tokens"),
            room=common_room(self._fleet, rollout.model),
            read=body["token_ids"],
        )

    async def generate(self, prompt: "TokenPrompt") -> Json:
        reply, body = Reply(prompt.read), prompt.body
        await self._runner.run(prompt, reply)
        self._runner.count_missing(reply.num_unscored)
        ids = prompt.read if body.get("return_token_ids") else None
        return prompt.as_asked({"prompt_logprobs": None} | prompt.told(reply) | {"prompt_token_ids": ids})


@dataclass(kw_only=True)
class TokenPrompt(Ask):
    """One prompt of token ids as its body asks for it."""

    @property
    def sampling(self) -> Json:
        sampling: Json = self.body["sampling_params"]
        return sampling

    @cached_property
    def inexact(self) -> tuple[str, ...] | None:
        """None with media, which one engine may have cached, and with text output: its text could not be joined as if
        it were made at once."""
        is_plain = (self.body.get("output_mode") or "tokens") == "tokens" and not any(map(self.body.get, _MEDIA))
        return super().inexact if is_plain else None

    def reads_whole(self, replica: Replica) -> bool:
        return super().reads_whole(replica) or not self.resumes

    async def asked(self, replica: Replica, *, streams: bool) -> tuple[str, Json]:
        if PATH not in replica.info.capabilities:
            raise lacking(PATH, [replica])
        body = self.body | {"request_id": self.rollout.request_id}
        if (before := self.before) is not None:
            sampling = rest_sampling(body["sampling_params"], before.token_ids, before.index)
            read = [*(self.read or ()), *before.token_ids]
            body |= {"token_ids": read, "sampling_params": sampling, "return_token_ids": None}
        return PATH, body

    def as_asked(self, told: Json) -> Json:
        """With the id that the client knows, and with versions as text, which vLLM's own routes read."""
        if name := self.body.get("request_id"):
            told["request_id"] = str(told.get("request_id") or name).replace(self.rollout.request_id, name)
        for choice in told["choices"]:
            choice.pop("prompt_token_ids", None)
            for span in choice.get("weight_versions") or ():
                span["version"] = str(span["version"])
        return told

    def bare(self) -> Json:
        return {"token_ids": [], "logprobs": None}

    def bare_head(self) -> Json:
        return {"request_id": self.rollout.request_id}


def lacking(path: str, replicas: Iterable[Replica]) -> UnknownRoute:
    """The error where no engine serves `path`; it names the engines that run and those that would serve it."""
    found = ", ".join(f"{one.replica_id} {one.info.kind} {one.info.engine_version}" for one in replicas) or "no replica"
    return UnknownRoute(f"{path} is served by vLLM (--enable-scale-out), and by none of these: {found}")


def _checked_length(token_ids: Any, max_len: int | None) -> int:
    if not isinstance(token_ids, list) or set(map(type, token_ids)) != {int}:
        raise InvalidRequest("token_ids must be a list of at least one token id", param="token_ids")
    return check_room("token_ids", len(token_ids), max_len)
