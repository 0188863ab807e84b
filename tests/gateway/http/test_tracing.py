"""Spans of OpenTelemetry, read from memory and from a collector's socket."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from engines import tracing
from engines.errors import ConfigError
from gateway.config.machine import lacks
from gateway.config.schema import Config
from tests.rigs.openai_server import OpenAiServer
from tests.rigs.rig import Rig, StartRig

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
BODY = {"prompt": [3], "max_tokens": 4}


@pytest.fixture
def recorded() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    tracing.use(tracing.Tracer(SimpleSpanProcessor(exporter), "test"))
    yield exporter
    tracing.stop()


def named(recorded: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in recorded.get_finished_spans() if span.name == name]


def only(recorded: InMemorySpanExporter, name: str) -> ReadableSpan:
    (span,) = named(recorded, name)
    return span


def is_under(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return span.parent is not None and parent.context is not None and span.parent.span_id == parent.context.span_id


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_its_attempt_and_the_engines_call_are_one_tree(
    rig: Rig, recorded: InMemorySpanExporter, stream: bool
) -> None:
    headers = PARENT | {"X-Request-Id": "mine"}
    async with rig.client.post(rig.url + "/v1/completions", json=BODY | {"stream": stream}, headers=headers) as reply:
        await reply.read()
    async with asyncio.timeout(20):
        while not named(recorded, "POST /v1/completions"):  # it ends after its last byte is read
            await asyncio.sleep(0.01)
    request, attempt = only(recorded, "POST /v1/completions"), only(recorded, "attempt")
    # The reader beside the engine is in this process too, and records its own.
    asked, call = [span for span in recorded.get_finished_spans() if span.kind is SpanKind.CLIENT]
    assert request.parent is not None
    assert (f"{request.parent.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, CALLER)
    assert is_under(attempt, request)
    assert is_under(call, attempt)
    assert is_under(asked, call)
    assert request.kind is SpanKind.SERVER
    assert request.attributes is not None
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["rollout_gateway.request"] == "mine"
    assert attempt.attributes is not None
    assert attempt.attributes["rollout_gateway.end"] == "answered"
    assert attempt.attributes["rollout_gateway.weight_version.end"] == 0


async def test_the_engine_gets_the_calls_span_as_its_parent(
    start_rig: StartRig, recorded: InMemorySpanExporter
) -> None:
    server = await OpenAiServer([], "").start()
    try:
        rig = await start_rig(engine={"kind": "external", "url": server.url, "model": "gpt"})
        await rig.post("/v1/completions", {"prompt": "hello", "max_tokens": 2}, headers=PARENT)
    finally:
        await server.stop()
    asked, call = named(recorded, "engine /v1/completions")  # beside the engine, and in the gateway
    assert is_under(asked, call)
    context = asked.context
    assert context is not None
    (passed,) = [one.get("traceparent") for one in server.headers]
    assert passed == f"00-{TRACE}-{context.span_id:016x}-01"


async def test_an_update_is_a_span_with_its_steps(rig: Rig, recorded: InMemorySpanExporter) -> None:
    await rig.open_group()
    await rig.update()
    update = only(recorded, "weight update")
    assert update.attributes is not None
    assert update.attributes["rollout_gateway.weight_version"] == 1
    steps = [span for span in recorded.get_finished_spans() if span.name.startswith("weight update: ")]
    assert {"weight update: transfer", "weight update: canary"} <= {step.name for step in steps}
    assert [step.name for step in steps if not is_under(step, update)] == []


@pytest.fixture
async def collector() -> AsyncIterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A collector's URL, and what it got."""
    got: list[ExportTraceServiceRequest] = []

    async def take(request: web.Request) -> web.Response:
        got.append(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", got
    await runner.cleanup()


async def test_a_collector_gets_the_spans_by_the_end_of_the_gateway(
    start_rig: StartRig, collector: tuple[str, list[ExportTraceServiceRequest]]
) -> None:
    url, got = collector
    rig = await start_rig(gateway={"otlp_endpoint": url})
    assert (await rig.post("/v1/completions", BODY))[0] == 200
    await rig.stop_gateway()
    resources = [spans for one in got for spans in one.resource_spans]
    assert {span.name for one in resources for scope in one.scope_spans for span in scope.spans} >= {"attempt"}
    facts = {fact.key: fact.value.string_value for one in resources for fact in one.resource.attributes}
    assert facts["service.name"] == "rollout-gateway"


def test_without_the_extra_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollout-gateway\[otel\]'"):
        tracing.start("http://127.0.0.1:4318", "test")
    monkeypatch.setattr("gateway.config.machine.find_spec", lambda name: None)
    config = Config.model_validate(
        {"engine": {"kind": "sim", "model": "sim"}, "gateway": {"otlp_endpoint": "http://127.0.0.1:4318"}}
    )
    assert [line for line in lacks(config, gpus=0) if "otlp_endpoint" in line] == [
        "gateway.otlp_endpoint needs OpenTelemetry: pip install 'rollout-gateway[otel]'"
    ]
