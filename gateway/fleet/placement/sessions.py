"""Names of sessions, the turns of agents: the replica that holds the prefix of one is the one that routing prefers."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.engine import Json
from engines.errors import InvalidRequest, shown

# vLLM's name first, then the one that SGLang's router reads, then those of Claude Code and Codex. A subagent of Codex
# has a thread of its own.
_HEADERS = ("X-Session-ID", "X-SMG-Routing-Key", "X-Claude-Code-Session-Id", "thread-id")
# The more exact field first: one user may have many conversations.
_OPENAI_FIELDS = ("prompt_cache_key", "user")
_MAX_LENGTH = 256
SESSION_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+=~-]{0,255}")
"""An id that a path can have."""
ID_RULE = "at most 256 letters, digits and _.:@+=~- make an id, the first a letter, a digit or _"


@dataclass(frozen=True, slots=True)
class Identity:
    """The session that records a call. `agent` names a subagent, `window` a part between two compactions, where the
    harness does; they are hints."""

    id: str
    agent: str | None = None
    window: str | None = None

    @property
    def home(self) -> str:
        """Its name for placement: a subagent has a prefix of its own."""
        return f"{self.id}/{self.agent}" if self.agent else self.id


def identity_of(named: str, headers: Mapping[str, str], body: Json) -> Identity | None:
    """The session that a call of an agent belongs to: the one `named` by its path or key, else that of the headers and
    fields of Claude Code, Codex and opencode. None where nothing names one. Raise `InvalidRequest`."""
    if named and not SESSION_ID.fullmatch(named):
        raise InvalidRequest(f"session = {named[:80]!r}: {ID_RULE}", param="session")
    codex, thread = headers.get("session-id"), headers.get("thread-id")
    subthread = thread if codex and thread != codex else None
    agent, window = headers.get("X-Claude-Code-Agent-Id") or subthread, headers.get("x-codex-window-id")
    given = headers.get("X-Session-Id") or headers.get("X-Claude-Code-Session-Id") or codex or thread
    given = given or _session_of_user(body.get("metadata")) or body.get("prompt_cache_key")
    name = named or (given if isinstance(given, str) else "")
    return Identity(_id(name), agent and _id(agent), window and _id(window)) if name else None


def _id(name: str) -> str:
    """A harness's own name, hashed where no path can have it."""
    known = SESSION_ID.fullmatch(name)
    return name if known else hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _session_of_user(metadata: Any) -> str | None:
    """The session in the text that Claude Code gives as its user's id."""
    try:
        found = json.loads(metadata["user_id"])["session_id"]
    except (ValueError, TypeError, KeyError):
        return None
    return found if isinstance(found, str) else None


def name_of_client(client: str, name: str) -> str:
    """Return the name of a request or session of this client alone: two clients may choose the same one."""
    return f"{name}-{hashlib.blake2b(client.encode(), digest_size=4).hexdigest()}"


def session_key(client: str, name: str) -> str:
    """The name under which a client's session is remembered: a long one is hashed."""
    if len(name) > _MAX_LENGTH:
        name = hashlib.blake2b(name.encode(errors="surrogateescape")).hexdigest()
    return name_of_client(client, name)


def session_of(client: str, headers: Mapping[str, str], body: Json) -> str:
    """The session that a client's request belongs to, as `session_key`; empty without one. Raises `InvalidRequest`.

    The order is vLLM's: the field of the body, headers, vllm_xargs; OpenAI's fields come last.
    """
    xargs, metadata = body.get("vllm_xargs"), body.get("metadata")
    named = {
        "session_id": body.get("session_id"),
        **dict(zip(_HEADERS, map(headers.get, _HEADERS), strict=True)),
        "vllm_xargs.session_id": xargs.get("session_id") if isinstance(xargs, dict) else None,
        **dict(zip(_OPENAI_FIELDS, map(body.get, _OPENAI_FIELDS), strict=True)),
        # Claude Code writes its session's id into this text.
        "metadata.user_id": metadata.get("user_id") if isinstance(metadata, dict) else None,
    }
    for name, value in named.items():
        if value in (None, ""):
            continue
        if not isinstance(value, str):
            raise InvalidRequest(f"{name} = {shown(value)} must be text", param=name)
        return session_key(client, value)
    return ""
