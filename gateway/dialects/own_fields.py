"""The fields of a request that are the gateway's own: how new the weights must be, how long samples will be."""

import math
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from engines.engine import Json
from engines.errors import InvalidRequest, shown
from gateway.fleet.adapters import Adapter
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.lengths import Lengths
from gateway.fleet.placement.routing import Rollout

_FRESHNESS = ("min_version", "max_staleness")
_EXPECTED = "expected_tokens"
_OF_ENGINES = "vllm_xargs"


class Terms(Struct, frozen=True, kw_only=True):
    """A request's own terms, by which its prompts become rollouts. `expected` are the client's estimates of a sample's
    length for each prompt; they order rollouts that wait."""

    model: str
    adapter: Adapter | None
    min_version: int
    max_staleness: int | None
    expected: Sequence[int | None]
    lengths: Lengths

    @classmethod
    def read(cls, body: Json, fleet: Fleet, lengths: Lengths, num_prompts: int = 1) -> "Terms":
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
            expected=read_expected(body, num_prompts),
            lengths=lengths,
        )

    def rollout(
        self, request_id: str, key: int, *, n: int, prompt_tokens: int, limit: int, place: int = 0, **more: Any
    ) -> Rollout:
        """The rollout of a prompt, the one at `place` of its request. `key` is the prompt's hash, which lengths are
        known by; `limit` bounds them in tokens."""
        expected = self.expected[place] or self.lengths.of(self.model, key)
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


def read_expected(body: Json, num_prompts: int = 1) -> Sequence[int | None]:
    """The estimate for each prompt, from a number for all or a list. Raise `InvalidRequest`."""
    xargs = body.get(_OF_ENGINES)
    given = body.get(_EXPECTED)
    if given is None and isinstance(xargs, dict):
        given = xargs.get(_EXPECTED)
    if not isinstance(given, list):
        return [given if given is None else _checked(_EXPECTED, given)] * num_prompts
    if len(given) != num_prompts:
        raise InvalidRequest(f"{_EXPECTED} has {len(given)} entries for {num_prompts} prompts", param=_EXPECTED)
    return [value if value is None else _checked(f"{_EXPECTED}[{index}]", value) for index, value in enumerate(given)]


def _checked(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise InvalidRequest(f"{name} = {shown(value)} must be a whole number of at least 1", param=_EXPECTED)
    return value


def without_own_fields(body: Json) -> Json:
    """The body for an engine, which knows nothing of the fields that this gateway reads."""
    kept = body.copy()
    for field in (*_FRESHNESS, _EXPECTED):
        kept.pop(field, None)
    xargs = kept.get(_OF_ENGINES)
    if isinstance(xargs, dict) and _EXPECTED in xargs:
        kept[_OF_ENGINES] = {key: value for key, value in xargs.items() if key != _EXPECTED} or None
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
