"""The fields of a request that are the gateway's own: how new the weights must be."""

import math
from typing import Any

from msgspec import Struct

from engines.engine import Json
from engines.errors import InvalidRequest, shown
from gateway.fleet.adapters import Adapter
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.lengths import Lengths
from gateway.fleet.placement.routing import Rollout

_FRESHNESS = ("min_version", "max_staleness")


class Terms(Struct, frozen=True, kw_only=True):
    """A request's own terms, by which its prompts become rollouts."""

    model: str
    adapter: Adapter | None
    min_version: int
    max_staleness: int | None
    lengths: Lengths

    @classmethod
    def read(cls, body: Json, fleet: Fleet, lengths: Lengths) -> "Terms":
        """Raise `InvalidRequest` where a field is no number, or can never be met."""
        model, adapter = fleet.asked(body.get("model") or None)
        for field in _FRESHNESS:
            if (value := body.get(field)) is not None and (type(value) is not int or value < 0):
                raise InvalidRequest(f"{field} = {shown(value)} is no whole number of at least 0", param=field)
        least = body.get("min_version") or 0
        if least > fleet.version_of(model) and (reason := fleet.why_fixed(model)):
            raise InvalidRequest(
                f"min_version = {least} can never be met: {reason}; ask for {fleet.version_of(model)} or leave it out",
                param="min_version",
            )
        return cls(
            model=model,
            adapter=adapter,
            min_version=least,
            max_staleness=body.get("max_staleness"),
            lengths=lengths,
        )

    def rollout(self, request_id: str, key: int, *, n: int, prompt_tokens: int, limit: int, **more: Any) -> Rollout:
        """The rollout of a prompt. `key` is the prompt's hash, which lengths are known by; `limit` bounds them in
        tokens."""
        expected = self.lengths.of(self.model, key)
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


def without_own_fields(body: Json) -> Json:
    """The body for an engine, which knows nothing of the fields that this gateway reads."""
    kept = body.copy()
    for field in _FRESHNESS:
        kept.pop(field, None)
    return kept


def common_room(fleet: Fleet, model: str) -> int | None:
    """The smallest `max_model_len` among the replicas of a model; None where no replica reports it."""
    lengths = [one.info.max_model_len for one in fleet.alive_of(model)]
    return min([length for length in lengths if length is not None], default=None)


def check_room(name: str, length: int, room: int | None) -> int:
    """Return the length of a prompt in tokens. Raise `InvalidRequest` where a completion has no room after it."""
    if room is not None and length >= room:
        raise InvalidRequest(
            f"{name} has {length} tokens, which leaves none of max_model_len = {room} for a completion: shorten it, or "
            "serve with a larger engine.max_model_len",
            param=name.partition("[")[0],
        )
    return length
