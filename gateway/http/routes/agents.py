"""The routes of agents: Anthropic's Messages and OpenAI's Responses, whole and streamed.

A stream begins at once and ends with its events once the answer is whole. Pings between keep proxies and clients
waiting: these cut a connection off that is silent for a minute.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from engines.engine import Json
from engines.errors import RolloutGatewayError
from gateway.agents.messages import Messages
from gateway.agents.responses import Responses
from gateway.agents.turn import Answer, Dialect, Turn
from gateway.agents.turns import TokenCounter, answer_of, chat_request
from gateway.api import status_of
from gateway.dialects.chat import Chat
from gateway.fleet.metrics import Deliveries
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.sessions import session_of
from gateway.http.access import CLIENT, Access, Handler
from gateway.http.json_body import read_object, reply
from gateway.http.middleware import Measurement, request_id

_PING_S = 10.0
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


@dataclass(eq=False)
class AgentRoutes:
    """Turns of agents, each as one conversation."""

    chat: Chat
    counter: TokenCounter
    measurement: Measurement
    deliveries: Deliveries

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        messages, responses = Messages(), Responses()

        async def count(request: web.Request) -> web.StreamResponse:
            turn = messages.read_prompt(await read_object(request))
            return reply(messages.count(await self.counter.count(turn)))

        def add(path: str, dialect: Dialect, handler: Handler) -> None:
            router.add_post(path, _in_words_of(dialect, access.for_inference(handler)))

        add("/v1/messages", messages, self._creates(messages, "msg_"))
        add("/v1/messages/count_tokens", messages, count)
        add("/v1/responses", responses, self._creates(responses, "resp_"))

    def _creates(self, dialect: Dialect, prefix: str) -> Handler:
        """Return the handler of one dialect, whose answers' ids begin with `prefix`."""

        async def create(request: web.Request) -> web.StreamResponse:
            body = await read_object(request)
            session = session_of(request[CLIENT], request.headers, body)
            turn, name = dialect.read(body), request_id(request)
            asked = chat_request(turn)
            self.measurement.arrived(request, asked, session)
            rollout = self.chat.decode(asked, name, session)
            answering = self._answer(request, rollout, asked, f"{prefix}{name}")
            if turn.streams:
                return await _stream(request, dialect, turn, f"{prefix}{name}", answering)
            return reply(dialect.reply(await answering, turn))

        return create

    async def _answer(self, request: web.Request, rollout: Rollout, asked: Json, answer_id: str) -> Answer:
        made = await self.chat.generate(rollout, asked)
        self.measurement.count_tokens(request, rollout.model, made.get("usage"))
        self.deliveries.count(rollout.model, made["choices"])
        return answer_of(made, answer_id)


def _in_words_of(dialect: Dialect, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Let errors before a reply begins be told as the dialect has them, those of keys too."""

    async def handled(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except RolloutGatewayError as error:
            return reply(dialect.error(error), status_of(error))

    return handled


async def _stream(
    request: web.Request, dialect: Dialect, turn: Turn, answer_id: str, answering: Awaitable[Answer]
) -> web.StreamResponse:
    """Send the events of a turn. A client that is gone ends its generation."""
    making = asyncio.ensure_future(answering)
    response = web.StreamResponse(headers=_HEADERS)
    try:
        await response.prepare(request)
        await response.write(dialect.begin(answer_id, turn))
        while not (await asyncio.wait({making}, timeout=_PING_S))[0]:
            await response.write(dialect.ping)
        try:
            answer = making.result()
        except RolloutGatewayError as error:
            await response.write(dialect.error_event(error))
        else:
            for event in dialect.events(answer, turn):
                await response.write(event)
        await response.write_eof()
        return response
    finally:
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
