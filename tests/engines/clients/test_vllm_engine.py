"""Faults of an engine during a request: small servers, each with one fault."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from engines.clients import connections
from engines.clients.vllm_engine import VllmEngine
from engines.errors import DeadlineExceeded, EngineFailed, EngineRefused, EngineUnreachable
from engines.weight_label import WeightLabel
from tests.rigs.calls import chunks_of

TIMEOUT_S = 60.0
PATH = "/v1/completions"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Connect = Callable[[str], VllmEngine]
Serve = Callable[..., Awaitable[VllmEngine]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    engines: list[VllmEngine] = []

    def to(url: str) -> VllmEngine:
        engines.append(VllmEngine("r1", url))
        return engines[-1]

    yield to
    for engine in engines:
        await engine.close()


@pytest.fixture
async def serve(connect: Connect) -> AsyncIterator[Serve]:
    """`await serve(handler)` answers every request with `handler` and gives the engine that asks it."""
    runners: list[web.AppRunner] = []

    async def start(handler: Handler) -> VllmEngine:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runners.append(web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        return connect(f"http://127.0.0.1:{runners[-1].addresses[0][1]}")

    yield start
    for runner in runners:
        await runner.cleanup()


def answering(body: str, status: int = 200) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text=body, status=status)

    return handler


def streaming(*blocks: bytes, then: Handler | None = None) -> Handler:
    """Sends each block by itself; `then` does what comes after the last."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for block in blocks:
            await response.write(block)
            await asyncio.sleep(0.01)
        if then is not None:
            await then(request)
        return response

    return handler


async def silence(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(300)
    raise AssertionError


async def cut(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def streamed(engine: VllmEngine, timeout_s: float = TIMEOUT_S) -> list[dict[str, Any]]:
    return [chunk async for chunk in chunks_of(engine, PATH, {"prompt": [1]}, timeout_s)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"error": {"message": "too long", "code": 400}}', "/v1/completions answered 400: too long"),
        ('{"message": "too long"}', "too long"),
        ('{"detail": "too long"}', "too long"),
        ('{"error": "too long"}', "too long"),
        ("too long", "too long"),
    ],
)
async def test_a_4xx_is_refused_with_its_words_status_and_replica(serve: Serve, body: str, words: str) -> None:
    engine = await serve(answering(body, status=400))
    with pytest.raises(EngineRefused, match=words) as refused:
        await engine.generate(PATH, {}, TIMEOUT_S)
    assert (refused.value.status, refused.value.replica_id) == (400, "r1")
    assert body in ("too long", json.dumps(refused.value.body)), "the engine's own"


@pytest.mark.parametrize(
    ("handler", "error", "said"),
    [
        (answering('{"error": {"message": "CUDA error"}}', 500), EngineFailed, "answered 500: CUDA error"),
        (answering("CUDA error", 500), EngineFailed, "answered 500: CUDA error"),
        (answering("<html>"), EngineFailed, "did not answer JSON: b'<html>'"),
        (cut, EngineUnreachable, PATH),
        (streaming(b'{"choices":', then=cut), EngineUnreachable, PATH),
        (silence, DeadlineExceeded, r"no answer to /v1/completions within 0\.1 s"),
        (streaming(b'{"choices":', then=silence), DeadlineExceeded, PATH),
    ],
)
async def test_an_odd_answer_is_an_error_that_names_replica_and_route(
    serve: Serve, handler: Handler, error: type[Exception], said: str
) -> None:
    engine = await serve(handler)
    with pytest.raises(error, match=f"replica r1: .*{said}"):
        await engine.generate(PATH, {}, 0.1 if error is DeadlineExceeded else TIMEOUT_S)


@pytest.mark.parametrize(
    ("handler", "error", "said"),
    [
        (answering('{"message": "no such model"}', 404), EngineRefused, "no such model"),
        (streaming(b'data: {"error": {"message": "died"}}\n\ndata: [DONE]\n\n'), EngineFailed, "interrupted: .*died"),
        (streaming(b'data: {"i": 0}\n\n'), EngineUnreachable, r"ended without \[DONE\]"),
        (streaming(b'data: {"i": 0}\n\n', then=cut), EngineUnreachable, PATH),
        (streaming(b'data: {"i": 0}\n\n', then=silence), DeadlineExceeded, PATH),
    ],
)
async def test_an_odd_stream_is_an_error_that_names_the_replica(
    serve: Serve, handler: Handler, error: type[Exception], said: str
) -> None:
    engine = await serve(handler)
    with pytest.raises(error, match=f"replica r1: .*{said}"):
        await streamed(engine, 0.1 if error is DeadlineExceeded else TIMEOUT_S)


@pytest.mark.parametrize(
    "answer", [*(f'{{"weight_version": {odd}}}' for odd in ("null", "true", "1.5", '["3"]')), "[]"]
)
async def test_a_label_that_is_no_text_is_a_failure(serve: Serve, answer: str) -> None:
    with pytest.raises(EngineFailed, match=r"replica r1: its answer .* cannot be read"):
        await (await serve(answering(answer))).weight_label(TIMEOUT_S)


async def test_a_connection_that_does_not_come_about_is_unreachable(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_CONNECT_TIMEOUT_S", 0.2)
    with socket.socket() as full, socket.socket() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting.connect(full.getsockname())  # all the room there is: who comes now is not answered
        with pytest.raises(EngineUnreachable, match="timeout"):
            await connect(f"http://127.0.0.1:{full.getsockname()[1]}").health(TIMEOUT_S)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_a_stream_is_its_events_however_they_are_cut_into_blocks(serve: Serve, line_end: bytes) -> None:
    sent = b': ping\n\ndata: {"i": 0}\n\ndata: {"i": 1}\n\ndata: {"i": 2}\n\ndata: [DONE]\n\n'
    sent = sent.replace(b"\n", line_end)
    blocks = [sent[:12], sent[12:25], sent[25:26], sent[26:-1], sent[-1:]]
    assert await streamed(await serve(streaming(*blocks))) == [{"i": 0}, {"i": 1}, {"i": 2}]


async def test_an_error_event_comes_after_the_chunks_of_its_block(serve: Serve) -> None:
    engine = await serve(streaming(b'data: {"i": "\\"error\\""}\n\ndata: {"id": "a", "error": {"code": 400}}\n\n'))
    chunks = chunks_of(engine, PATH, {}, 1)
    assert await anext(chunks) == {"i": '"error"'}
    with pytest.raises(EngineRefused, match="was interrupted"):
        await anext(chunks)


@pytest.mark.parametrize(
    ("body", "label"),
    [
        ('{"weight_version": "3-0000000a"}', WeightLabel("3-0000000a", "3-0000000a")),
        ('{"weight_version": "?3-0000000a"}', WeightLabel("", "3-0000000a")),
        ('{"weight_version": "default"}', WeightLabel("0", "0")),
    ],
)
async def test_what_an_engine_holds_is_told_by_its_label(serve: Serve, body: str, label: WeightLabel) -> None:
    assert await (await serve(answering(body))).weight_label(TIMEOUT_S) == label


async def test_abandoning_an_update_that_is_over_is_no_error(serve: Serve) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/finish_weight_update":
            return web.json_response({"error": "no update is active"}, status=500)
        return web.json_response({"weight_version": "mixed"})

    await (await serve(answer)).abandon_weight_update(TIMEOUT_S)


@pytest.mark.parametrize("said_at", ["init", "update"])
async def test_packed_is_said_where_engines_want_it(serve: Serve, said_at: str) -> None:
    heard: dict[str, Any] = {}

    async def listen(request: web.Request) -> web.Response:
        heard.update(await request.json())
        return web.json_response({})

    url = (await serve(listen)).url
    engine = VllmEngine("r1", url)
    await engine.open_weight_group({"world_size": 2, **({"packed": True} if said_at == "init" else {})}, TIMEOUT_S)
    await engine.update_weights({"names": ["w"], **({"packed": True} if said_at == "update" else {})}, TIMEOUT_S)
    await engine.close()
    assert heard["init_info"]["packed"]
    assert heard["update_info"] == {"names": ["w"]}
