"""/inference/v1/generate of vLLM's dialect: token ids of one prompt in, token ids out, with their weight versions.

An engine that serves the route gets the body as it is; any other engine gets it in the words of /v1/completions.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import structlog

from engines.chunks import Chunk
from engines.engine import Json
from engines.errors import InvalidRequest, UnknownRoute
from engines.raw_json import encoded, opened
from engines.types import ReplicaInfo
from gateway.dialects import completions
from gateway.dialects.resumption import rest_sampling
from gateway.dialects.runner import DEFAULT_MAX_TOKENS, Ask, Runner
from gateway.dialects.sample import Reply
from gateway.dialects.sampling import Terms, check_id, check_room, check_sampling, common_room, normalise_numbers
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.sessions import name_of_client
from gateway.fleet.replica import Replica

log = structlog.get_logger()

PATH = "/inference/v1/generate"

_REFUSED = ("kv_transfer_params", "ec_transfer_params")  # they tie a request to one engine
_MEDIA = ("features", "content_parts")  # images and sound as vLLM's route has them
# The fields of vLLM's SamplingParams that /v1/completions has too, by the same name.
_SAME_NAME = frozenset(
    {
        "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens",
        "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "prompt_logprobs",
        "logit_bias", "allowed_token_ids", "bad_words", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "structured_outputs", "detokenize",
    }
)  # fmt: skip
# /v1/completions takes these, where they are missing, from the model's generation_config.json.
_DEFAULTS: Json = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_PASSED = ("model", "cache_salt", "priority", "stream_options", "session_id")


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
            needs_route=PATH if _media_of(body) else "",
            session=session,
        )
        return self.prompt(rollout, body)

    def prompt(self, rollout: Rollout, body: Json) -> "TokenPrompt":
        """A decoded body as what engines are asked."""
        return TokenPrompt(
            rollout=rollout,
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
        is_plain = (self.body.get("output_mode") or "tokens") == "tokens" and not _media_of(self.body)
        return super().inexact if is_plain else None

    def reads_whole(self, replica: Replica) -> bool:
        return super().reads_whole(replica) or not self.resumes

    async def asked(self, replica: Replica, *, streams: bool) -> tuple[str, Json]:
        if (field := _media_of(self.body)) and not _serves(replica):
            raise InvalidRequest(
                f"{field} needs an engine with {PATH} (vLLM from 0.30 on, --enable-scale-out), and replica "
                f"{replica.replica_id} runs {replica.info.kind} {replica.info.engine_version}: send images to "
                "/v1/chat/completions",
                param=field,
            )
        body = self.body | {"request_id": self.rollout.request_id}
        if (before := self.before) is not None:
            sampling = rest_sampling(body["sampling_params"], before.token_ids, before.index)
            read = [*(self.read or ()), *before.token_ids]
            body |= {"token_ids": read, "sampling_params": sampling, "return_token_ids": None}
        return (PATH, body) if _serves(replica) else (completions.PATH, completion_body(body, replica.info))

    def worded(self, chunk: Chunk, replica: Replica, *, is_whole: bool) -> Chunk:
        if _serves(replica):
            return chunk
        body, translate = (
            self.body | {"request_id": self.rollout.request_id},
            token_reply if is_whole else token_chunk,
        )
        return Chunk.read(encoded(translate(chunk.decoded(), body)))

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
    return UnknownRoute(f"{path} is served by vLLM from 0.30 on (--enable-scale-out), and by none of these: {found}")


def _media_of(body: Json) -> str:
    """The field of a body that has images or sound, or ""."""
    return next((field for field in _MEDIA if body.get(field)), "")


def _serves(replica: Replica) -> bool:
    return PATH in replica.info.capabilities


def _checked_length(token_ids: Any, max_len: int | None) -> int:
    if not isinstance(token_ids, list) or set(map(type, token_ids)) != {int}:
        raise InvalidRequest("token_ids must be a list of at least one token id", param="token_ids")
    return check_room("token_ids", len(token_ids), max_len)


def completion_body(body: Json, info: ReplicaInfo) -> Json:
    """Return the body for /v1/completions of the replica `info`. Raise `InvalidRequest` for a parameter it lacks."""
    sampling = {key: value for key, value in body["sampling_params"].items() if value is not None}
    for key in sampling:
        if key not in _SAME_NAME:
            raise InvalidRequest(
                f"sampling_params.{key}: replica {info.replica_id} runs {info.kind} {info.engine_version}, which lacks "
                "/inference/v1/generate, and /v1/completions has no such parameter: leave it out",
                param=key,
            )
    if body.get("output_mode", "tokens") == "text" and sampling.get("logprobs") is not None:
        raise InvalidRequest(
            f"output_mode = 'text' with logprobs needs /inference/v1/generate, which {info.kind} {info.engine_version} "
            f"of replica {info.replica_id} lacks: leave one of them out",
            param="output_mode",
        )
    room = None if info.max_model_len is None else info.max_model_len - len(body["token_ids"])
    limit = {} if room is None else {"max_tokens": room}
    passed = {key: body[key] for key in _PASSED if body.get(key) is not None}
    return {
        **passed,
        **_DEFAULTS,
        **limit,
        **sampling,
        "prompt": body["token_ids"],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def token_reply(answer: Json, body: Json) -> Json:
    """Return a reply of /v1/completions in the form of /inference/v1/generate."""
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    return {
        "request_id": body["request_id"],
        "model": answer.get("model"),
        "created": answer.get("created") or int(time.time()),
        "output_mode": body.get("output_mode") or "tokens",
        "choices": [_choice(choice, body) for choice in choices],
        "usage": answer.get("usage"),
        "prompt_logprobs": choices[0].get("prompt_logprobs"),
        "prompt_token_ids": body["token_ids"] if body.get("return_token_ids") else None,
    }


def token_chunk(chunk: Json, body: Json) -> Json:
    """Return a chunk of a stream of /v1/completions in the form of /inference/v1/generate."""
    reply: Json = {"request_id": body["request_id"], "output_mode": body.get("output_mode") or "tokens"}
    reply["choices"] = [_choice(choice, body) for choice in chunk["choices"]]
    if body.get("return_token_ids") and any(choice.get("prompt_token_ids") for choice in chunk["choices"]):
        reply["prompt_token_ids"] = body["token_ids"]
    return reply | {"usage": chunk.get("usage")}


def _choice(choice: Json, body: Json) -> Json:
    reply: Json = {
        "index": choice["index"],
        "finish_reason": choice.get("finish_reason"),
        "stop_reason": choice.get("stop_reason"),
        "token_ids": choice.get("token_ids"),
        "logprobs": {"content": _logprobs(choice)} if choice.get("logprobs") else None,
        "weight_versions": choice.get("weight_versions"),
    }
    return reply | {"text": choice["text"]} if body.get("output_mode") == "text" else reply


def _logprobs(choice: Json) -> list[Json]:
    """Return an entry for each token: its log-prob, and candidates in the engine's order, the token itself first."""
    logprobs = opened(choice["logprobs"])
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["token_logprobs"])
    return [
        {"token_id": token_id, "logprob": logprob, "rank": None, "top_logprobs": _candidates(top)}
        for token_id, logprob, top in zip(choice["token_ids"], logprobs["token_logprobs"], tops, strict=True)
    ]


def _candidates(top: dict[str, Any] | None) -> list[Json]:
    return [{"token_id": token_id_of(name), "logprob": value, "rank": None} for name, value in (top or {}).items()]


def token_id_of(name: str) -> int:
    """Return the id of a token that is named by it, as in `token_id:7`."""
    return int(name.removeprefix("token_id:"))
