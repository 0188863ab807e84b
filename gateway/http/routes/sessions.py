"""/v1/sessions: sessions of agents are begun, rewarded, frozen, read and acked by their trainer."""

import asyncio
import uuid
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from aiohttp import web
from msgspec import Meta, Struct, field, msgpack

from engines.engine import Json
from engines.errors import InvalidRequest
from gateway.agents.session import Session
from gateway.agents.sessions import Sessions
from gateway.dialects.fields import read_fields
from gateway.fleet.placement.sessions import ID_RULE, SESSION_ID
from gateway.http.access import CLIENT, Access
from gateway.http.json_body import read_object, reply, send_pieces

_MOST_METADATA = 64 << 10
_MSGPACK = {"Content-Type": "application/msgpack"}


class _Begin(Struct):
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    metadata: dict[str, Any] | None = None


class _Reward(Struct):
    reward: float
    call: Annotated[int, Meta(ge=0)] | None = None
    info: dict[str, Any] | None = None


class _Freeze(Struct):
    reward: float | None = None
    info: dict[str, Any] | None = None
    wait_s: Annotated[float, Meta(ge=0, le=600)] = 0.0


@dataclass(eq=False)
class SessionRoutes:
    """Sessions of the client's key."""

    sessions: Sessions

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        self._access = access
        router.add_post("/v1/sessions", access.for_sessions(self._begin))
        router.add_get("/v1/sessions", access.for_sessions(self._list), allow_head=False)
        router.add_get("/v1/sessions/{id}", access.for_sessions(self._read), allow_head=False)
        router.add_delete("/v1/sessions/{id}", access.for_sessions(self._delete))
        router.add_post("/v1/sessions/{id}/reward", access.for_sessions(self._reward))
        router.add_post("/v1/sessions/{id}/freeze", access.for_sessions(self._freeze))
        router.add_post("/v1/sessions/{id}/ack", access.for_sessions(self._ack))

    async def _begin(self, request: web.Request) -> web.Response:
        """Begin a session, or join the one of this id, and reply with its key and its path."""
        asked = read_fields(_Begin, await read_object(request, required=False))
        if not SESSION_ID.fullmatch(name := asked.id):
            raise InvalidRequest(f"id = {name[:80]!r}: {ID_RULE}", param="id")
        _check_size("metadata", asked.metadata)
        session, is_new = self.sessions.begun(request[CLIENT], name, asked.metadata)
        await session.record.written()
        key, url = self._access.session_key(request, name), f"/sessions/{name}/v1"
        told = {"id": name, "key": key, "url": url, "state": session.state, "began": session.head.began, "new": is_new}
        return reply(told, 201 if is_new else 200)

    async def _list(self, request: web.Request) -> web.Response:
        """Reply with the client's sessions, of one state where it names one."""
        state = request.query.get("state")
        if state not in (None, "open", "frozen"):
            raise InvalidRequest(f"state = {state!r:.80}: there are open and frozen", param="state")
        heads = [one.report() for one in self.sessions.of(request[CLIENT]) if state in (None, one.state)]
        shown = ("id", "state", "calls", "open_calls", "tokens", "began", "reward")
        return reply({"sessions": [{name: head[name] for name in shown} for head in heads]})

    async def _read(self, request: web.Request) -> web.StreamResponse:
        """Reply with a session and its calls."""
        session = self._found(request)
        records = []
        for record in (self._head(session), *session.records()):
            records.append(_framed(record))
            await asyncio.sleep(0)  # images of a whole session would keep the loop
        return await send_pieces(request, records, headers=_MSGPACK)

    async def _reward(self, request: web.Request) -> web.Response:
        """Note the reward of a session, or of one of its calls."""
        session = self._found(request)
        asked = read_fields(_Reward, await read_object(request))
        if asked.call is not None and asked.call >= len(session.calls):
            raise InvalidRequest(f"call = {asked.call}: the session has {len(session.calls)} calls", param="call")
        if asked.call is not None and asked.info is not None:
            raise InvalidRequest("info is the session's: leave it out of the reward of a call", param="info")
        _check_size("info", asked.info)
        session.reward(asked.reward, asked.call, asked.info)
        await session.record.written()
        return reply(self._head(session))

    async def _freeze(self, request: web.Request) -> web.Response:
        """Take no later call of a session, and end open ones after `wait_s`."""
        session = self._found(request)
        asked = read_fields(_Freeze, await read_object(request, required=False))
        _check_size("info", asked.info)
        session.reward(asked.reward, None, asked.info)
        await session.freeze(asked.wait_s)
        return reply(self._head(session))

    async def _ack(self, request: web.Request) -> web.Response:
        """Drop a session that its trainer has."""
        await self.sessions.ack(request[CLIENT], request.match_info["id"])
        return reply({"id": request.match_info["id"], "state": "acked"})

    async def _delete(self, request: web.Request) -> web.Response:
        """End a session's calls and drop it."""
        await self.sessions.delete(request[CLIENT], request.match_info["id"])
        return reply({"id": request.match_info["id"], "state": "deleted"})

    def _found(self, request: web.Request) -> Session:
        return self.sessions.find(request[CLIENT], request.match_info["id"])

    def _head(self, session: Session) -> Json:
        return session.report() | {"durable": self.sessions.is_durable}


def _framed(record: Json) -> bytes:
    """Return a record in msgpack after its length, itself a msgpack integer of five bytes: a streaming decoder sees
    both in turn, any other cuts by length."""
    content = msgpack.encode(record)
    return b"\xce" + len(content).to_bytes(4) + content


def _check_size(name: str, given: Json | None) -> None:
    if given is not None and (size := len(orjson.dumps(given))) > _MOST_METADATA:
        raise InvalidRequest(f"{name} has {size} bytes of JSON: at most {_MOST_METADATA} are kept", param=name)
