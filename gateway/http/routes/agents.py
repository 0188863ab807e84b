"""/v1/messages and /v1/responses: agents and SDKs as they are, given a base URL and a key."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from engines.engine import Json
from engines.errors import RolloutGatewayError
from gateway.agents.messages import Messages
from gateway.agents.responses import Responses
from gateway.agents.turn import Answer, Dialect, Turn, chat_request
from gateway.agents.turns import Caller, Turns
from gateway.fleet.placement.sessions import session_of
from gateway.http.access import CLIENT, Access, Handler
from gateway.http.json_body import read_object, reply
from gateway.http.middleware import Measurement, error_reply, request_id

_PING_S = 10.0
_EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


@dataclass(eq=False)
class AgentRoutes:
    """Turns of agents, each in the dialect of its client, its errors too."""

    turns: Turns
    measurement: Measurement

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        self._messages = Messages()
        self._add(router, access, "/v1/messages", self._messages, self._answers(self._messages))
        self._add(router, access, "/v1/messages/count_tokens", self._messages, self._count_tokens)
        responses = Responses()
        self._add(router, access, "/v1/responses", responses, self._answers(responses))

    def _add(self, router: web.UrlDispatcher, access: Access, path: str, dialect: Dialect, handler: Handler) -> None:
        checked = access.for_inference(handler)

        async def worded(request: web.Request) -> web.StreamResponse:
            try:
                return await checked(request)
            except RolloutGatewayError as error:
                return error_reply(error, dialect.error(error))

        router.add_post(path, worded)

    def _answers(self, dialect: Dialect) -> Handler:
        async def answered(request: web.Request) -> web.StreamResponse:
            body = await read_object(request)
            session = session_of(request[CLIENT], request.headers, body)
            turn = dialect.read(body)
            self.measurement.arrived(request, chat_request(turn), session)
            caller = Caller(request_id(request), request[CLIENT], session)
            prepared = await self.turns.prepare(turn, caller)
            answer_id = uuid.uuid4().hex

            async def answering() -> Answer:
                answer = await self.turns.answer(prepared, answer_id)
                usage: Json = {"prompt_tokens": answer.num_prompt_tokens, "completion_tokens": answer.num_tokens}
                self.measurement.count_tokens(request, prepared.rollout.model, usage)
                return answer

            if turn.streams:
                return await _stream(request, dialect, turn, answer_id, answering)
            return reply(dialect.reply(await answering(), turn))

        return answered

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        turn = self._messages.read_prompt(await read_object(request))
        return reply(self._messages.count(await self.turns.count(turn)))


async def _stream(
    request: web.Request, dialect: Dialect, turn: Turn, answer_id: str, answering: Callable[[], Awaitable[Answer]]
) -> web.StreamResponse:
    """Send the first events at once, pings while the answer is made, then its events. The answer of a
    client that leaves ends with it."""
    response = web.StreamResponse(headers=_EVENTS)
    await response.prepare(request)
    await response.write(dialect.begin(answer_id, turn))
    task = asyncio.ensure_future(answering())
    try:
        while not (await asyncio.wait({task}, timeout=_PING_S))[0]:
            await response.write(dialect.ping)
        for event in dialect.events(task.result(), turn):
            await response.write(event)
    except RolloutGatewayError as error:
        await response.write(dialect.error_event(error))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await response.write_eof()
    return response
