"""The routes of /v1/sessions. Each call may be made twice, so each is made again while the gateway is away."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

from engines.errors import DeadlineExceeded, UnknownRoute
from trainer_client.client import RolloutClient
from trainer_client.http import Json
from trainer_client.retries import Retries, now
from trainer_client.sessions.records import Session, read_session

T = TypeVar("T")

PATH = "/v1/sessions"
_CALL_TIMEOUT_S = 30.0
_READ_TIMEOUT_S = 600.0
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class OpenSession:
    """What an agent is given: a base URL, or a key that names the session at any base URL of the gateway."""

    id: str
    key: str
    url: str
    """Of OpenAI's clients, as http://127.0.0.1:8100/sessions/ID/v1."""
    began: float = 0.0
    """When, by the gateway's clock: a session of this id that began at another time is another one."""
    is_frozen: bool = False
    is_new: bool = True
    """False where the gateway had it before."""

    @property
    def anthropic_url(self) -> str:
        """The base URL of Anthropic's clients, which add /v1 themselves."""
        return self.url.removesuffix("/v1")


class Sessions:
    """The sessions of a client's gateway. Raises the gateway's errors."""

    def __init__(self, client: RolloutClient) -> None:
        self._http, self._outage_s = client._http, client._outage_s

    async def begin(self, session_id: str | None = None, metadata: Json | None = None) -> OpenSession:
        """Begin a session, or join that of this id. `metadata` is kept with its record."""
        found = await self._call("POST", PATH, {"id": session_id, "metadata": metadata})
        url, is_frozen = self._http.url + found["url"], found["state"] == "frozen"
        return OpenSession(found["id"], found["key"], url, found["began"], is_frozen, found["new"])

    async def reward(
        self, session_id: str, reward: float, *, call: int | None = None, info: Json | None = None
    ) -> Json:
        """Set the reward of a session, or of one call; the last one counts. Return the session's head."""
        body = {"reward": reward, "call": call, "info": info}
        return await self._call("POST", f"{_path(session_id)}/reward", body)

    async def freeze(self, session_id: str, reward: float | None = None, *, wait_s: float = 0.0) -> Json:
        """End a session: calls that are open after `wait_s` are cut off, and later ones refused. Return its head."""
        body = {"wait_s": wait_s, "reward": reward}
        return await self._call("POST", f"{_path(session_id)}/freeze", body, _CALL_TIMEOUT_S + wait_s)

    async def read(self, session_id: str) -> Session:
        """Return a session with all its calls, open or frozen."""
        return read_session(await self.records(session_id))

    async def records(self, session_id: str) -> list[Json]:
        """Return a session as the gateway sends it, ids and log-probs as bytes."""
        return await self._again(lambda _: self._http.records(_path(session_id)), _READ_TIMEOUT_S)

    async def ack(self, session_id: str) -> None:
        """Let the gateway forget a frozen session that is stored here. One that it has forgotten stays so."""
        with suppress(UnknownRoute):  # a 404
            await self._call("POST", f"{_path(session_id)}/ack")

    async def drop(self, session_id: str) -> None:
        """Cut off a session and let the gateway forget it."""
        with suppress(UnknownRoute):  # a 404
            await self._call("DELETE", _path(session_id))

    async def _call(self, method: str, path: str, body: Json | None = None, timeout_s: float = _CALL_TIMEOUT_S) -> Json:
        return await self._again(lambda s: self._http.call(method, path, body, timeout_s=min(s, timeout_s)), timeout_s)

    async def _again(self, ask: Callable[[float], Awaitable[T]], timeout_s: float) -> T:
        """Make a call, within `timeout_s` and what the gateway may be away for."""
        limit_s = timeout_s + self._outage_s
        retries = Retries(_ATTEMPTS, self._outage_s, limit_s, now() + limit_s)
        try:
            async with asyncio.timeout(limit_s):
                return await retries.run(ask)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._http.url} has not answered within {limit_s:g} s") from error


def _path(session_id: str) -> str:
    return f"{PATH}/{quote(session_id, safe='')}"
