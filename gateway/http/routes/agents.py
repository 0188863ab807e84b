"""/v1/messages, /v1/responses and the chat of sessions: agents and SDKs as they are, given a base URL and a key."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from aiohttp import web

from engines.engine import Json
from engines.errors import RolloutGatewayError, SessionFrozen
from gateway.agents.chat import ChatCompletions
from gateway.agents.messages import Messages
from gateway.agents.responses import Responses
from gateway.agents.turn import Answer, Caller, Dialect, Turn
from gateway.agents.turns import Turns
from gateway.fleet.placement.sessions import identity_of, session_key, session_of
from gateway.http.access import CLIENT, SESSION, Access, Handler
from gateway.http.json_body import read_object, reply
from gateway.http.middleware import error_reply, request_id

log = structlog.get_logger()

_PING_S = 10.0
_EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_OF_SESSION = "/sessions/{session}"


@dataclass(eq=False)
class AgentRoutes:
    """Turns of agents, each in the dialect of its client, its errors too."""

    turns: Turns

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        self._messages = messages = Messages()
        answering = self._answers(access, messages, "messages")
        responding = self._answers(access, Responses(), "responses")
        for of_session in ("", _OF_SESSION):
            router.add_post(f"{of_session}/v1/messages", answering)
            router.add_post(f"{of_session}/v1/messages/count_tokens", _worded(access, messages, self._count_tokens))
            router.add_post(f"{of_session}/v1/responses", responding)
        self.chat = self._answers(access, ChatCompletions(), "chat")
        router.add_post(f"{_OF_SESSION}/v1/chat/completions", self.chat)

    def _answers(self, access: Access, dialect: Dialect, name: str) -> Handler:
        async def answered(request: web.Request) -> web.StreamResponse:
            body = await read_object(request)
            turn = dialect.read(body)
            caller = _caller(request, body, name)
            answer_id, rendered = uuid.uuid4().hex, asyncio.get_running_loop().create_future()
            answering = partial(self.turns.answer, turn, caller, answer_id, partial(rendered.set_result, None))
            if turn.streams:
                return await _stream(request, dialect, turn, answer_id, answering, rendered)
            answer = await answering()
            response = reply(dialect.reply(answer, turn))
            try:
                await response.prepare(request)
                await response.write_eof()
            except (ConnectionError, asyncio.CancelledError):
                answer.undelivered()
                raise
            return response

        return _worded(access, dialect, answered)

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        turn = self._messages.read_prompt(await read_object(request))
        return reply({"input_tokens": await self.turns.count(turn)})


def _worded(access: Access, dialect: Dialect, handler: Handler) -> Handler:
    """Return a handler behind its check, whose errors have the dialect's form."""
    checked = access.for_agents(handler)

    async def worded(request: web.Request) -> web.StreamResponse:
        try:
            return await checked(request)
        except RolloutGatewayError as error:
            response = error_reply(error, dialect.error(error))
            if isinstance(error, SessionFrozen):
                response.headers["x-should-retry"] = "false"  # the official clients would, after a 409
            return response

    return worded


def _caller(request: web.Request, body: Json, dialect: str) -> Caller:
    client = request[CLIENT]
    identity = identity_of(request[SESSION], request.headers, body)
    placement = session_key(client, identity.home) if identity else session_of(client, request.headers, body)
    is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"  # of Anthropic's and OpenAI's clients
    return Caller(request_id(request), client, placement, dialect, identity, is_retry)


async def _stream(
    request: web.Request,
    dialect: Dialect,
    turn: Turn,
    answer_id: str,
    answering: Callable[[], Awaitable[Answer]],
    rendered: asyncio.Future[Any],
) -> web.StreamResponse:
    """Send the first events once the turn is rendered, which an error before keeps its status by; or else soon, and
    pings while the answer is made. Then send its events. The answer of a client that leaves ends with it."""
    response, is_delivered = web.StreamResponse(headers=_EVENTS), False
    task = asyncio.ensure_future(answering())
    try:
        await asyncio.wait({task, rendered}, timeout=_PING_S, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        await response.prepare(request)
        await response.write(dialect.begin(answer_id, turn))
        while not (await asyncio.wait({task}, timeout=_PING_S))[0]:
            await response.write(dialect.ping)
        for event in dialect.events(task.result(), turn):
            await response.write(event)
        await response.write_eof()
        is_delivered = True
    except Exception as error:
        if isinstance(error, ConnectionError) or not response.prepared:
            raise  # the client is gone, or is told the status
        if not isinstance(error, RolloutGatewayError):
            log.error("a stream failed in a way that was not foreseen", path=request.path, exc_info=error)
            error = RolloutGatewayError("the gateway failed; its log has the reason")
        await response.write(dialect.error_event(error))
        await response.write_eof()
    finally:
        task.cancel()
        [made] = await asyncio.gather(task, return_exceptions=True)
        if isinstance(made, Answer) and not is_delivered:
            made.undelivered()
    return response
