"""The fields of `POST /v1/rollouts`: groups with their defaults, checked before any of them runs."""

import uuid
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from engines.engine import Json
from engines.errors import InvalidRequest
from gateway.dialects.fields import read_fields
from gateway.dialects.sampling import MAX_PROMPTS
from gateway.fleet.concurrency import in_turns
from gateway.fleet.placement.sessions import SESSION_ID

# Fields of /v1/completions that have another place here, or that no stream has.
_NOT_SAMPLING = (
    "prompt", "messages", "model", "n", "stream", "stream_options", "return_token_ids", "min_version", "max_staleness",
    "session_id", "priority", "request_id", "echo", "suffix", "best_of", "use_beam_search",
    "length_penalty", "prompt_logprobs", "prompt_embeds",
)  # fmt: skip
_MOST_SAMPLES = 1 << 19
_AT_ONCE = 200  # groups
_GROUP_BYTES = 300

_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Count = Annotated[int, Meta(ge=1, le=1_000_000)]
_Priority = Annotated[int, Meta(ge=-1_000_000, le=1_000_000)]
_Seconds = Annotated[float, Meta(gt=0, le=30 * 86400.0)]
_Id = Annotated[str, Meta(pattern=rf"^{SESSION_ID.pattern}\Z")]


class OnDeadline(StrEnum):
    """The treatment of samples that are open at their group's deadline."""

    CANCEL = "cancel"
    RETURN_PARTIAL = "return_partial"


class Group(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One prompt, text or token ids, with its n samples, of which `need` are enough."""

    prompt: str | list[int]
    n: _Count = 1
    need: _Count = 1
    sampling: dict[str, Any] = {}
    model: _Name | None = None
    deadline_s: _Seconds | None = None
    on_deadline: OnDeadline = OnDeadline.CANCEL
    session_id: _Name | None = None
    min_version: Any = None
    max_staleness: Any = None
    priority: _Priority = 0

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory: a list of token ids has an object for each distinct one."""
        prompt = self.prompt
        return _GROUP_BYTES + (len(prompt) if isinstance(prompt, str) else 8 * len(prompt) + 32 * len(set(prompt)))

    @property
    def body(self) -> Json:
        """The body of /v1/completions that asks for this group's samples."""
        asked = {
            "model": self.model,
            "min_version": self.min_version,
            "max_staleness": self.max_staleness,
        }
        return {**self.sampling, **_given(asked), "prompt": [self.prompt], "n": self.n, "return_token_ids": True}


class Request(Struct, kw_only=True, forbid_unknown_fields=True):
    """A body: its groups, and values for all of them."""

    groups: Annotated[list[Any], Meta(min_length=1, max_length=MAX_PROMPTS)]
    id: _Id = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    stream: bool = True
    model: Any = None
    n: Any = None
    need: Any = None
    deadline_s: Any = None
    on_deadline: Any = None
    sampling: Any = None
    min_version: Any = None
    max_staleness: Any = None
    priority: Any = None

    async def read_groups(self) -> list[Group]:
        """Return the groups. Raise `InvalidRequest` with the field. Others get turns on the loop meanwhile."""
        fields = msgspec.structs.asdict(self)
        shared = _given({name: value for name, value in fields.items() if name not in ("groups", "id", "stream")})
        read: list[Group] = []
        async for index, group in in_turns(enumerate(self.groups), _AT_ONCE):
            read.append(_group(f"groups[{index}]", group, shared))
        if (samples := sum(group.n for group in read)) > _MOST_SAMPLES:
            raise InvalidRequest(f"the groups have {samples} samples, more than {_MOST_SAMPLES}: send fewer at a time")
        return read


def _group(where: str, given: Any, shared: Json) -> Group:
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} is a {type(given).__name__}: send an object", param=where)
    asked = _given(shared | given)
    asked["sampling"] = _sampling(where, shared.get("sampling"), given.get("sampling"))
    asked["prompt"] = _prompt(where, asked.get("prompt"))
    group = read_fields(Group, asked, where)
    if "need" not in asked:
        return msgspec.structs.replace(group, need=group.n)
    if group.need > group.n:
        raise InvalidRequest(f"{where}: need = {group.need} is more than n = {group.n}", param=f"{where}.need")
    return group


def _prompt(where: str, prompt: Any) -> Any:
    if isinstance(prompt, bytes):
        if len(prompt) % 4:
            raise InvalidRequest(f"{where}.prompt has {len(prompt)} bytes, no int32 values", param=f"{where}.prompt")
        prompt = np.frombuffer(prompt, "<i4").tolist()
    if isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt):
        return list(map(dict[int, int]().setdefault, prompt, prompt))  # JSON gives an object for each token
    return prompt


def _sampling(where: str, shared: Any, own: Any) -> Json:
    parts = [part for part in (shared, own) if part is not None]
    for part in parts:
        if not isinstance(part, dict):
            raise InvalidRequest(f"{where}.sampling must be an object", param=f"{where}.sampling")
        if wrong := [key for key in part if key in _NOT_SAMPLING]:
            raise InvalidRequest(
                f"{where}.sampling.{wrong[0]} is refused: it is a field of the group, or asks for what no stream has",
                param=f"{where}.sampling.{wrong[0]}",
            )
    sampling: Json = {key: value for part in parts for key, value in part.items()}
    logprobs = sampling.pop("logprobs", True)
    if type(logprobs) is not bool:
        raise InvalidRequest(
            f"{where}.sampling.logprobs = {logprobs!r:.80} must be true or false: true is those of the sampled tokens",
            param=f"{where}.sampling.logprobs",
        )
    return sampling | ({"logprobs": 0} if logprobs else {})


def _given(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}
