"""Rules about a body's fields that the dialects share: sampling, freshness, room, the salt of prefix caches."""

import math
from typing import Any
from uuid import uuid4

from msgspec import Struct

from engines.engine import Json
from engines.errors import InvalidRequest, shown
from gateway.fleet.adapters import Adapter
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.routing import Lengths, Rollout
from gateway.fleet.replica import Replica

_WHOLE_NUMBERS = ("n", "max_tokens", "max_completion_tokens", "min_tokens", "top_k", "best_of", "seed")
_NUMBERS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty",
)  # fmt: skip

_MAX_N = 1024
"""Most completions of one prompt."""
MAX_PROMPTS = 16_384
"""Most prompts of one request."""
# The longest id that a client may give a request: ids are kept, and sent to every process that may have the request.
LONGEST_ID = 256


def check_id(name: Any, field: str) -> str:
    """Return the id of a request. Raise `InvalidRequest` for one that is no text or too long."""
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{field} = {shown(name)} must be text", param=field)
    if len(name) > LONGEST_ID:
        raise InvalidRequest(
            f"{field} = {name[:40]!r}... has {len(name)} characters: give an id of at most {LONGEST_ID}", param=field
        )
    return name


def normalise_numbers(body: Json) -> None:
    """Turn numbers that came as text into numbers, and 4.0 into 4 where a whole number is due, as vLLM does.

    Raises `InvalidRequest` for values that are no numbers.
    """
    for field in filter(body.__contains__, (*_WHOLE_NUMBERS, *_NUMBERS)):
        value, is_whole = body[field], field in _WHOLE_NUMBERS
        if not (value is None or type(value) is int or (type(value) is float and not is_whole)):
            body[field] = _number(field, value, is_whole=is_whole)


def _number(field: str, value: object, *, is_whole: bool) -> int | float:
    if isinstance(value, str | float):
        try:
            number = float(value)
            if not is_whole:
                return number
            if number.is_integer():
                return int(value) if isinstance(value, str) and value.strip("+-").isdecimal() else int(number)
        except (ValueError, OverflowError):
            pass
    raise InvalidRequest(f"{field} = {shown(value)} must be a {'whole ' if is_whole else ''}number", param=field)


def check_sampling(body: Json) -> int:
    """The number of samples. Normalises numbers; raises `InvalidRequest` for fields that every engine would refuse."""
    normalise_numbers(body)
    n, temperature = 1 if body.get("n") is None else body["n"], body.get("temperature", 1.0)
    if body.get("prompt_embeds") is not None:
        raise InvalidRequest("prompt_embeds is refused: tensors are not read from requests", param="prompt_embeds")
    if type(n) is not int or not 1 <= n <= _MAX_N:
        raise InvalidRequest(f"n = {n!r} is not between 1 and {_MAX_N}", param="n")
    if n > 1 and temperature == 0 and not body.get("use_beam_search"):
        raise InvalidRequest(f"n = {n} with temperature = 0 would repeat one completion: use n = 1", param="n")
    for field in ("max_tokens", "max_completion_tokens"):
        limit, least = body.get(field), 0 if body.get("echo") else 1
        if limit is not None and limit < least:
            raise InvalidRequest(f"{field} = {limit!r} must be a whole number of at least 1", param=field)
    options = body.get("stream_options")
    if options and not (isinstance(options, dict) and body.get("stream")):
        raise InvalidRequest("stream_options is an object that goes with stream = true alone", param="stream_options")
    return n


class Terms(Struct, frozen=True, kw_only=True):
    """A request's own terms, by which its prompts become rollouts."""

    model: str
    adapter: Adapter | None
    min_version: int
    max_staleness: int | None
    lengths: Lengths

    @classmethod
    def take(cls, body: Json, fleet: Fleet, lengths: Lengths) -> "Terms":
        """Read the model and take the fields that are the gateway's own, of which engines know nothing. Raise
        `InvalidRequest` where a field is no number, or can never be met."""
        model, adapter = fleet.asked(body.get("model") or None)
        least, staleness = body.pop("min_version", None), body.pop("max_staleness", None)
        for field, value in (("min_version", least), ("max_staleness", staleness)):
            if value is not None and (type(value) is not int or value < 0):
                raise InvalidRequest(f"{field} = {shown(value)} is no whole number of at least 0", param=field)
        if least and least > fleet.version_of(model) and (reason := fleet.why_fixed(model)):
            raise InvalidRequest(
                f"min_version = {least} can never be met: {reason}; ask for {fleet.version_of(model)} or leave it out",
                param="min_version",
            )
        return cls(model=model, adapter=adapter, min_version=least or 0, max_staleness=staleness, lengths=lengths)

    def rollout(
        self, request_id: str, prompt: str | list[int], *, n: int, prompt_tokens: int, limit: int, **more: Any
    ) -> Rollout:
        """The rollout of a prompt, which lengths are known by; "" is unlike all others. `limit` bounds them in
        tokens."""
        key, expected = self.lengths.of(self.model, prompt)
        return Rollout(
            request_id=request_id,
            model=self.model,
            n=n,
            tokens=prompt_tokens + n * min(limit, math.ceil(expected or limit)),
            prompt_tokens=prompt_tokens,
            adapter=self.adapter,
            min_version=self.min_version,
            max_staleness=self.max_staleness,
            expected=expected,
            prompt_key=key,
            **more,
        )


def common_room(fleet: Fleet, model: str) -> int | None:
    """The smallest `max_model_len` among the replicas of a model; None where no replica reports it."""
    room = None
    for replica in fleet.alive_of(model):
        length = replica.info.max_model_len
        if length is not None and (room is None or length < room):
            room = length
    return room


def check_room(name: str, length: int, room: int | None) -> int:
    """Return the length of a prompt in tokens. Raise `InvalidRequest` where a completion has no room after it."""
    if room is not None and length >= room:
        raise InvalidRequest(
            f"{name} has {length} tokens, which leaves none of max_model_len = {room} for a completion: shorten it, or "
            "serve with a larger engine.max_model_len",
            param=name.partition("[")[0],
        )
    return length


def versioned_salt(body: Json, replica: Replica, adapter: Adapter | None) -> str:
    """A salt per weight version: prefix KV of other weights would be a silent mixture.

    A request that is sent during an update shares no prefix: the next request may meet other weights.
    vLLM 0.32 keys prefixes by an adapter's name and path, which do not tell two loads of it apart; the salt does.
    """
    loaded = f"a{adapter.load_id}" if adapter else ""
    held = uuid4().hex if replica.weight_version is None else replica.weight_version
    return f"{body.get('cache_salt') or ''}v{held}{loaded}"
