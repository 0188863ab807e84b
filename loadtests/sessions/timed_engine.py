"""An engine's door that notes the seconds of each turn: the rest of what a client waits for is the gateway's time."""

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
import orjson
from aiohttp import web

_TURN = re.compile(r"turn (\d+-\d+);")
_MARK_TOKENS = 400
_LEFT_OUT = ("Host", "Content-Length", "Transfer-Encoding", "Content-Encoding")


class TimedEngine:
    """Passes all on to an engine. `spent` are seconds by turn, which the last words of its prompt name."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)

    async def spent(self, request: web.Request) -> web.Response:
        return web.json_response(self._spent.pop(request.match_info["turn"], 0.0))

    async def passed(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        began = time.perf_counter()
        headers = {name: value for name, value in request.headers.items() if name not in _LEFT_OUT}
        url = self._engine + request.path_qs
        async with self._client.request(request.method, url, data=content, headers=headers) as answer:
            given = {name: value for name, value in answer.headers.items() if name not in _LEFT_OUT}
            response = web.StreamResponse(status=answer.status, headers=given)
            with suppress(ConnectionError):  # where the gateway has left
                await response.prepare(request)
                async for block in answer.content.iter_any():
                    await response.write(block)
                await response.write_eof()
        self._note(content, time.perf_counter() - began)
        return response

    def _note(self, content: bytes, seconds: float) -> None:
        body = orjson.loads(content) if content else {}
        found = body.get("prompt_token_ids") or body.get("prompt") or body.get("token_ids")
        if found:
            token_ids = found[0] if isinstance(found[0], list) else found
            text = "".join(chr(token_id - 3) for token_id in token_ids[-_MARK_TOKENS:] if token_id >= 3)
        else:
            text = content[-4 * _MARK_TOKENS :].decode(errors="replace")
        if turns := _TURN.findall(text):
            self._spent[turns[-1]] += seconds


@asynccontextmanager
async def serve(engine: str) -> AsyncIterator[str]:
    """Serve in front of `engine`."""
    timed = TimedEngine(engine)
    app = web.Application(client_max_size=1 << 28)
    app.add_routes([web.get("/spent/{turn}", timed.spent), web.route("*", "/{any:.*}", timed.passed)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield "http://{}:{}".format(*runner.addresses[0][:2])
    await asyncio.gather(runner.cleanup(), timed._client.close())
