"""A vLLM of others that takes no weights, with OpenAI's routes alone."""

from collections.abc import Mapping
from typing import Any

from aiohttp import web


class OpenAiServer:
    """Lists one model, `gpt`, and answers every prompt with one word of two tokens.

    `bodies` and `headers` keep what it was sent.
    """

    def __init__(self, routes: list[web.RouteDef], key: str) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        card = {"id": "gpt", "object": "model", "owned_by": "vllm"}
        self.listing: dict[str, Any] = {"object": "list", "data": [card]}
        app = web.Application(middlewares=[self._check_key])
        app.add_routes(routes)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._key = key
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        self.url = ""

    async def start(self) -> "OpenAiServer":
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self._key and request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        return await handler(request)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(self.listing)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        text = {"message": {"role": "assistant", "content": "echo"}} if "messages" in body else {"text": "echo"}
        choices = [{"index": index, "finish_reason": "stop", **text} for index in range(body.get("n", 1))]
        usage = {"prompt_tokens": 1, "completion_tokens": 2 * len(choices), "total_tokens": 1 + 2 * len(choices)}
        answer = {"id": "x", "object": "text_completion", "model": "gpt", "choices": choices, "usage": usage}
        if not body.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + web.json_response(answer).body + b"\n\ndata: [DONE]\n\n")  # type: ignore[operator]
        return response
