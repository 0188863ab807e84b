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
    """An image, sound or video, as a file of its type has it; an address is text/uri-list."""

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
    """An earlier call with the same prompt, in whose place its client made this one."""
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
    """Of the whole prompt, in its order."""
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

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights of any sampled token; None without tokens."""
        return min((span.version for call in self.calls for span in call.spans or ()), default=None)


def read_session(events: Sequence[Json]) -> Session:
    """Return the session in the records of GET /v1/sessions/ID.

    Raise `RolloutGatewayError` for records of a newer schema, and `EngineFailed` for others that are not as they
    should be.
    """
    head, *records, end = events
    where = f"session {head['id']!r}"
    if head["schema_version"] > SCHEMA_VERSION:
        raise RolloutGatewayError(
            f"{where} has records of schema_version {head['schema_version']}, and this client reads up to "
            f"{SCHEMA_VERSION}: install the rollout-gateway of the gateway's version beside the trainer"
        )
    if end.get("type") != "end" or end["calls"] != len(records):
        raise EngineFailed(f"{where}: {len(records)} calls came, and the last record is {end!r:.200}")
    try:
        session = msgspec.convert({**head, "calls": records}, Session, dec_hook=_array)
    except msgspec.ValidationError as error:
        raise EngineFailed(f"{where}: {error}") from error
    contents = dict[str, Media]()
    for call in session.calls:  # a content comes with the first call that has it, and then as a digest
        call.media[:] = [contents.setdefault(one.id, one) for one in call.media]
    return session


def _array(kind: Any, given: Any) -> NDArray[Any]:
    (dtype,) = get_args(get_args(kind)[1])
    return np.frombuffer(given, np.dtype(dtype).newbyteorder("<"))
