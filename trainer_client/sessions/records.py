"""What the gateway recorded of one session: its calls, with token ids as arrays."""

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from engines.errors import EngineFailed, RolloutGatewayError
from trainer_client.http import Json
from trainer_client.results import WeightSpan

SCHEMA_VERSION = 1
"""The newest form of records that this client reads."""

Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]


class Media(msgspec.Struct, frozen=True):
    """An image, sound or video of a prompt, as a file of its type has it; an address is text/uri-list. In the record
    the first call that has it names more than its digest."""

    id: str
    media_type: str = ""
    data: bytes = b""


class Call(msgspec.Struct, frozen=True, kw_only=True, eq=False, rename={"index": "call", "spans": "weight_versions"}):
    """One call of an agent: a prompt, and the tokens sampled after it. `agent` and `window` are names of harnesses."""

    index: int
    parent: int | None
    """The call whose prompt and tokens begin this one's prompt; None for a root."""
    root_reason: str | None = None
    retry_of: int | None = None
    """An earlier call with the same prompt, whatever its sampling."""
    dialect: str
    model: str
    agent: str | None = None
    window: str | None = None
    began: float
    ended: float | None = None
    state: str
    """One of "open", "ended", "cut" and "failed"."""
    mask: str | None = None
    """Why its tokens are not to be trained; None where they are."""
    prompt_tokens: int
    """Of the whole prompt."""
    prompt_token_ids: Ids
    """Those after all ids of the parent; of a root all."""
    token_ids: Ids
    logprobs: Logprobs | None = None
    """One for each of `token_ids`; NaN where the engine gave none."""
    spans: tuple[WeightSpan, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    sampling: Json | None = None
    tools: list[Json] | None = None
    """Of roots alone: a call has the tools of its root."""
    media: list[Media] = []
    """Of the whole prompt, in its order; `Session.media_of` has their contents."""
    routed_experts: bytes = b""
    """A file of numpy's [rows, layers, experts a token], as the engine gave it: the last rows of all ids but the last
    one, and at least those from the parent's last id on."""
    reward: float | None = None
    error: Json | None = None


class Session(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One session as it was read; `calls` in their order. One that is not durable is in the gateway's memory alone."""

    id: str
    state: str
    """ "open" or "frozen". """
    durable: bool = False
    began: float
    reward: float | None = None
    info: Json | None = None
    metadata: Json | None = None
    calls: list[Call]

    def path(self, index: int) -> list[Call]:
        """Return a call after all that its prompt begins with, the root first."""
        path = [self.calls[index]]
        while (parent := path[-1].parent) is not None:
            path.append(self.calls[parent])
        return path[::-1]

    def media_of(self, index: int) -> list[Media]:
        """Return the contents in the prompt of a call."""
        found = {one.id: one for call in self.calls for one in call.media if one.media_type}
        return [found[one.id] for one in self.calls[index].media]

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights of any sampled token; None without tokens."""
        return min((span.version for call in self.calls for span in call.spans or ()), default=None)


def read_session(events: Sequence[Json]) -> Session:
    """Return the session in the records of GET /v1/sessions/ID, decoded from msgpack or from lines of JSON.

    Raise `RolloutGatewayError` for records of a newer schema, and `EngineFailed` for others that are not as they
    should be.
    """
    head, *records, end = events
    if head["schema_version"] > SCHEMA_VERSION:
        raise RolloutGatewayError(
            f"session {head['id']!r} has records of schema_version {head['schema_version']}, and this client reads up "
            f"to {SCHEMA_VERSION}: install the rollout-gateway of the gateway's version beside the trainer"
        )
    where = f"session {head['id']!r}"
    if end.get("type") != "end" or end["calls"] != len(records):
        raise EngineFailed(f"{where}: {len(records)} calls came, and the last record is {end!r:.200}")
    try:
        session = msgspec.convert({**head, "calls": records}, Session, dec_hook=_array)
    except msgspec.ValidationError as error:
        raise EngineFailed(f"{where}: {error}") from error
    ends: list[int] = []
    for place, call in enumerate(session.calls):
        ends.append(call.prompt_tokens + len(call.token_ids))
        if call.index != place or not (call.parent is None or 0 <= call.parent < place):
            raise EngineFailed(f"{where}, call {place}: it is numbered {call.index}, and its parent is {call.parent}")
        before, own = 0 if call.parent is None else ends[call.parent], len(call.prompt_token_ids)
        if before + own != call.prompt_tokens:
            raise EngineFailed(
                f"{where}, call {place}: {before} tokens of its parent and {own} of its own are not its prompt of "
                f"{call.prompt_tokens}"
            )
        if call.logprobs is not None and len(call.logprobs) != len(call.token_ids):
            raise EngineFailed(f"{where}, call {place}: {len(call.token_ids)} tokens, {len(call.logprobs)} logprobs")
    return session


def _array(kind: Any, given: Any) -> NDArray[Any]:
    """Return msgpack's bytes, or JSON's numbers, as an array; None among numbers is NaN."""
    (dtype,) = get_args(get_args(kind)[1])
    if isinstance(given, bytes | memoryview):
        return np.frombuffer(given, np.dtype(dtype).newbyteorder("<"))
    return np.asarray(given, np.float64 if dtype is np.float32 else None).astype(dtype)
