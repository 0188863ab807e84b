"""A server on loopback that answers every turn of a dialect with the answer it is given, or with an error."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from engines.errors import RolloutGatewayError
from gateway.agents.turn import Answer, Dialect, Turn
from gateway.api import status_of


class Answering:
    """`turns` are those that it read. `late_error` ends a stream that has begun."""

    def __init__(self, dialect: Dialect, path: str) -> None:
        self._dialect = dialect
        self._path = path
        self.turns: list[Turn] = []
        self.answer = answer_of()
        self.error: RolloutGatewayError | None = None
        self.late_error: RolloutGatewayError | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post(self._path, self._create)
        async with TestServer(app) as server:
            yield str(server.make_url("/")).rstrip("/")

    @asynccontextmanager
    async def asked_by_openai(self) -> AsyncIterator[Any]:
        """OpenAI's client of it."""
        import openai  # of two of the dialects alone

        async with (
            self.running() as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=10.0) as client,
        ):
            yield client

    async def _create(self, request: web.Request) -> web.StreamResponse:
        try:
            turn = self._dialect.read(await request.json())
            if self.error:
                raise self.error
        except RolloutGatewayError as error:
            return web.json_response(self._dialect.error(error), status=status_of(error))
        self.turns.append(turn)
        if not turn.streams:
            return web.json_response(self._dialect.reply(self.answer, turn))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(self._dialect.begin(self.answer.id, turn) + self._dialect.ping)
        if self.late_error:
            await response.write(self._dialect.error_event(self.late_error))
        else:
            for event in self._dialect.events(self.answer, turn):
                await response.write(event)
        await response.write_eof()
        return response


def call(call_id: str, name: str, arguments: str) -> Any:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer_of(finish: str = "stop", stop: str | int | None = None, **message: Any) -> Answer:
    """An answer of 7 tokens to a prompt of 30, of which 20 were in a cache."""
    return Answer(
        id="a1",
        model="policy",
        message={"role": "assistant", "content": None} | (message or {"content": "Hello."}),
        finish_reason=finish,
        stop_reason=stop,
        num_prompt_tokens=30,
        num_cached_tokens=20,
        num_tokens=7,
    )
