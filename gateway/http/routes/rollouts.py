"""The routes that generate tokens, in every dialect: decoded here, run by the dialect, encoded here."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial

from aiohttp import web

from engines.engine import Json
from engines.errors import DeadlineExceeded, EngineError
from gateway.api import error_body
from gateway.dialects.chat import Chat
from gateway.dialects.completions import Completions
from gateway.dialects.sglang_generate import SglangGenerate
from gateway.dialects.token_generation import TokenGeneration
from gateway.dialects.usage import Usage
from gateway.fleet.deliveries import Deliveries
from gateway.fleet.placement.sessions import session_of
from gateway.http.access import Access
from gateway.http.event_stream import send_events
from gateway.http.json_body import read_object, reply
from gateway.http.middleware import Measurement
from gateway.http.request_id import request_id

_HEALTH_TIMEOUT_S = 20.0


class RolloutRoutes:
    """Generation, in OpenAI's dialect and by the token routes of vLLM and SGLang."""

    def __init__(
        self,
        completions: Completions,
        chat: Chat,
        tokens: TokenGeneration,
        sglang: SglangGenerate,
        measurement: Measurement,
        deliveries: Deliveries,
        write_timeout_s: float,
    ) -> None:
        self._write_timeout_s = write_timeout_s
        self._completions = completions
        self._chat = chat
        self._tokens = tokens
        self._sglang = sglang
        self._measurement = measurement
        self._deliveries = deliveries

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        router.add_post("/v1/completions", access.for_inference(self._create_completions))
        router.add_post("/v1/chat/completions", access.for_inference(self._create_chat_completion))
        router.add_post("/inference/v1/generate", access.for_inference(self._generate_tokens))
        router.add_post("/inference/v1/abort_requests", access.for_inference(self._abort_requests))
        router.add_post("/generate", access.for_inference(self._generate_sglang))
        router.add_get("/health_generate", access.for_inference(self._health_generate))

    async def _create_completions(self, request: web.Request) -> web.StreamResponse:
        """Generate samples of one or many prompts, whole or streamed."""
        body, session = await self._read(request)
        prompts = self._completions.decode(body, request_id(request, body), session)
        model = prompts[0].rollout.model
        if body.get("stream"):
            return await self._stream(request, model, partial(self._completions.stream, prompts))
        return await self._answer(request, model, self._completions.generate(prompts))

    async def _create_chat_completion(self, request: web.Request) -> web.StreamResponse:
        """Generate samples of one conversation, whole or streamed."""
        body, session = await self._read(request)
        rollout = self._chat.decode(body, request_id(request, body), session)
        if body.get("stream"):
            return await self._stream(request, rollout.model, partial(self._chat.stream, rollout, body))
        return await self._answer(request, rollout.model, self._chat.generate(rollout, body))

    async def _generate_tokens(self, request: web.Request) -> web.StreamResponse:
        """Generate token ids from token ids, in vLLM's dialect."""
        body, session = await self._read(request)
        rollout = self._tokens.decode(body, request_id(request), session)
        if body.get("stream"):
            return await self._stream(request, rollout.model, partial(self._tokens.stream, rollout, body))
        return await self._answer(request, rollout.model, self._tokens.generate(rollout, body))

    async def _generate_sglang(self, request: web.Request) -> web.StreamResponse:
        """Generate samples of one or many prompts, in SGLang's dialect."""
        body, session = await self._read(request)
        batch = self._sglang.decode(body, request_id(request), session)
        if body.get("stream"):
            return await self._stream(request, batch.model, partial(self._sglang.stream, batch))
        answers, usage = await self._sglang.generate(batch)
        self._measurement.count_tokens(request, batch.model, usage)
        return reply(answers)

    async def _abort_requests(self, request: web.Request) -> web.Response:
        """End requests of /inference/v1/generate with the tokens they have."""
        await self._tokens.abort((await read_object(request)).get("request_ids"))
        return reply({})

    async def _health_generate(self, request: web.Request) -> web.Response:
        """Reply 200 after one token: SGLang's check that tokens are generated."""
        prompts = self._completions.decode({"prompt": "a", "max_tokens": 1}, request_id(request))
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                await self._completions.generate(prompts)
        except (TimeoutError, EngineError, DeadlineExceeded) as error:
            reason = str(error) or f"no token within {_HEALTH_TIMEOUT_S:g} s"
            return reply(error_body(f"{reason}: see /status", 503), 503)
        return reply({})

    async def _read(self, request: web.Request) -> tuple[Json, str]:
        """Return the body of a request for tokens, and its session."""
        at, began = time.time(), time.monotonic()
        body = await read_object(request)
        session = session_of(request.headers, body)
        self._measurement.arrived(request, body, session, at, began)
        return body, session

    async def _answer(self, request: web.Request, model: str, generated: Awaitable[Json]) -> web.Response:
        """Send the whole answer, and count its tokens and choices."""
        answer = await generated
        self._measurement.count_tokens(request, model, answer.get("usage"))
        self._deliveries.count(model, answer["choices"])
        return reply(answer)

    async def _stream(
        self, request: web.Request, model: str, chunks: Callable[[Usage], AsyncGenerator[Json]]
    ) -> web.StreamResponse:
        """Send chunks. Their tokens are counted also if the client disconnects."""
        usage = Usage()
        try:
            return await send_events(request, self._deliveries.counted(model, chunks(usage)), self._write_timeout_s)
        finally:
            self._measurement.count_tokens(request, model, usage.total())
