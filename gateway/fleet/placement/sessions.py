"""Remembers the replica that holds the prefix of each session, the turns of one agent.

Routing prefers it, unless it is overloaded.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from engines.engine import Json
from engines.errors import InvalidRequest

# vLLM's name first, then the one that SGLang's router reads.
_HEADERS = ("X-Session-ID", "X-SMG-Routing-Key")
# The more exact field first: one user may have many conversations.
_OPENAI_FIELDS = ("prompt_cache_key", "user")
_MAX_LENGTH = 256
_REMEMBERED = 100_000


class Sessions:
    """The replica that each session was last placed on. The least recently used are forgotten beyond `limit`."""

    def __init__(self, limit: int = _REMEMBERED) -> None:
        self._limit = limit
        self._homes: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, model: str, session: str) -> str | None:
        """Id of the replica that has the session's prefix; None for a new session and for no session."""
        return self._homes.get((model, session)) if session else None

    def settle(self, model: str, session: str, replica_id: str) -> None:
        """Remember where the session's newest turn was placed."""
        if not session:
            return
        self._homes[model, session] = replica_id
        self._homes.move_to_end((model, session))
        while len(self._homes) > self._limit:
            self._homes.popitem(last=False)


def session_of(headers: Mapping[str, str], body: Json) -> str:
    """The session that a request belongs to, hashed if its name is long; empty without one. Raises `InvalidRequest`.

    The order is vLLM's: the field of the body, headers, vllm_xargs; OpenAI's fields come last.
    """
    xargs = body.get("vllm_xargs")
    named: dict[str, Any] = {
        "session_id": body.get("session_id"),
        **{header: headers.get(header) for header in _HEADERS},
        "vllm_xargs.session_id": xargs.get("session_id") if isinstance(xargs, dict) else None,
        **{field: body.get(field) for field in _OPENAI_FIELDS},
    }
    for name, value in named.items():
        if value in (None, ""):
            continue
        if not isinstance(value, str):
            raise InvalidRequest(f"{name} = {value!r:.80} must be text", param=name)
        if len(value) > _MAX_LENGTH:
            return hashlib.blake2b(value.encode(errors="surrogateescape")).hexdigest()
        return value
    return ""
