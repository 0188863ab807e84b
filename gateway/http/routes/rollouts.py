"""The routes that generate tokens, in every dialect: decoded here, run by the dialect, encoded here."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from engines.engine import Json
from gateway.dialects.chat import Chat
from gateway.dialects.completions import CompletionPrompt, Completions, Written
from gateway.dialects.replays import Replays, identity_of
from gateway.dialects.runner import A
from gateway.dialects.streams import Show, total_usage
from gateway.dialects.token_generation import TokenGeneration
from gateway.fleet.metrics import Deliveries
from gateway.fleet.placement.sessions import session_of
from gateway.http.access import CLIENT, Access, has_session_key
from gateway.http.json_body import BeforeEnd, as_object, read_content, reply, send_events, send_pieces
from gateway.http.middleware import GIVEN_ID, request_id
from gateway.http.routes.agents import AgentRoutes


@dataclass(eq=False)
class RolloutRoutes:
    """Generation, in OpenAI's dialect and by vLLM's token routes."""

    completions: Completions
    chat: Chat
    tokens: TokenGeneration
    deliveries: Deliveries
    replays: Replays
    agents: AgentRoutes

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        self._access = access
        router.add_post("/v1/completions", access.for_inference(self._create_completions))
        of_others = access.for_inference(self._create_chat_completion)

        async def chat(request: web.Request) -> web.StreamResponse:
            return await (self.agents.chat if has_session_key(request) else of_others)(request)

        router.add_post("/v1/chat/completions", chat)
        router.add_post("/inference/v1/generate", access.for_inference(self._generate_tokens))

    async def _create_completions(self, request: web.Request) -> web.StreamResponse:
        content, body, session = await self._read(request)
        prompts = self.completions.decode(body, request_id(request, body), session)
        if body.get("stream"):
            return await self._stream(request, prompts[0].rollout.model, partial(self.completions.stream, prompts))
        is_batch = len(prompts) > 1 or prompts[0].rollout.n > 1  # a single sample is cheap to make again
        if request[GIVEN_ID] or not (is_batch and self.replays.are_on):
            return await self._send(request, prompts, await self.completions.written(prompts))
        identity = await identity_of(request.path, request[CLIENT], content)
        replying = self.replays.reply(identity, content, prompts, partial(self._send, request, prompts))
        del body, content  # large ones, for as long as the batch takes
        return await replying

    async def _send(
        self, request: web.Request, prompts: Sequence[CompletionPrompt], written: Written, seal: BeforeEnd | None = None
    ) -> web.StreamResponse:
        """Send a reply, then count it: a replay may get one that breaks off."""
        response = await send_pieces(request, written.pieces(), seal)
        model = prompts[0].rollout.model
        self.deliveries.count_tokens(model, written.head["usage"])
        self.deliveries.count_ends(model, written.ends)
        if len(prompts) > 1:
            self.deliveries.count_batch(model, written.seconds)
        return response

    async def _create_chat_completion(self, request: web.Request) -> web.StreamResponse:
        _, body, session = await self._read(request)
        conversation = self.chat.decode(body, request_id(request, body), session)
        return await self._answer(request, conversation, self.chat.generate)

    async def _generate_tokens(self, request: web.Request) -> web.StreamResponse:
        _, body, session = await self._read(request)
        prompt = self.tokens.decode(body, request_id(request), session, request[CLIENT])
        return await self._answer(request, prompt, self.tokens.generate)

    async def _read(self, request: web.Request) -> tuple[bytes, Json, str]:
        """Return the content of a request for tokens, its body, and its session."""
        content = await read_content(request)
        body = as_object(content)
        return content, body, session_of(request[CLIENT], request.headers, body)

    async def _answer(
        self, request: web.Request, ask: A, generate: Callable[[A], Awaitable[Json]]
    ) -> web.StreamResponse:
        """Send the whole answer, and count its tokens and choices; or stream it."""
        model = ask.rollout.model
        if ask.body.get("stream"):
            return await self._stream(request, model, partial(self.completions.stream, [ask]))
        answer = await generate(ask)
        self.deliveries.count_tokens(model, answer.get("usage"))
        self.deliveries.count(model, answer["choices"])
        return reply(answer)

    async def _stream(
        self, request: web.Request, model: str, work: Callable[[list[Json], Show], Awaitable[None]]
    ) -> web.StreamResponse:
        """Send chunks. Their tokens are counted also if the client disconnects."""
        usages: list[Json] = []

        async def counted(show: Show) -> None:
            def passed_on(chunk: Json) -> None:
                self.deliveries.count(model, chunk.get("choices") or ())
                show(chunk)

            await work(usages, passed_on)

        try:
            return await send_events(request, counted)
        finally:
            self.deliveries.count_tokens(model, total_usage(usages))
