"""The rollout URL: routes of vLLM's dialect, each decoded here, answered by one object, encoded here."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path

import structlog
from aiohttp import web

from engines.engine import Json
from engines.errors import (
    DeadlineExceeded,
    EngineError,
    EngineFailed,
    EngineRefused,
    InvalidRequest,
    RolloutGatewayError,
    WeightUpdateFailed,
)
from engines.model_folder import model_folder
from gateway.api import body_of, error_body, status_of
from gateway.config.schema import Config
from gateway.dialects.chat import Chat
from gateway.dialects.completions import Completions, Usage
from gateway.dialects.sglang_generate import SglangGenerate
from gateway.dialects.token_generation import TokenGeneration, lacking
from gateway.fleet.adapter_loading import AdapterCoordinator
from gateway.fleet.adapters import Adapter
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.fleet.replica import Replica
from gateway.fleet.scheduler import Scheduler
from gateway.fleet.sessions import session_of
from gateway.http.access import Access
from gateway.http.dashboard import Dashboard
from gateway.http.direct_peer import direct_peer
from gateway.http.json_body import event, read_object, reply
from gateway.http.keys import Guards, Handler
from gateway.http.sglang_routes import SglangControl
from gateway.http.snapshot_files import SnapshotFiles
from gateway.http.status import status_report
from gateway.http.trace import Arrival, Trace
from gateway.http.trl_legacy_routes import TrlLegacy
from gateway.http.weight_routes import WeightRoutes
from gateway.weights.coordinator import WeightCoordinator
from gateway.weights.snapshots import Snapshots

log = structlog.get_logger()

_REQUEST_ID = "X-Request-Id"
_USAGE: web.RequestKey[Json] = web.RequestKey("usage", dict)
_ARRIVAL = web.RequestKey("arrival", Arrival)
_ASK_TIMEOUT_S = 60.0
_HEALTH_TIMEOUT_S = 20.0


class GatewayServer:
    """The aiohttp application in front of one fleet. Owns the fleet's watch and the coordinator's."""

    def __init__(self, config: Config, fleet: Fleet, metrics: Metrics) -> None:
        self._config = config
        self._fleet = fleet
        self._metrics = metrics
        self._access = Access(config.gateway)
        self._scheduler = Scheduler(config.gateway, fleet, metrics)
        self._snapshots = Snapshots(config.weights, config.name, lambda: _checkpoint(config))
        fleet.noted = self._snapshots.noted
        self._weights = WeightCoordinator(config.weights, fleet, self._scheduler, metrics, self._snapshots)
        self._weight_routes = WeightRoutes(config.weights, fleet, self._weights, self._snapshots)
        self._snapshot_files = SnapshotFiles(fleet, self._snapshots)
        self._adapters = AdapterCoordinator(config.weights, fleet)
        self._completions = Completions(config.gateway, fleet, self._scheduler)
        self._tokens = TokenGeneration(config.gateway, fleet, self._scheduler)
        self._chat = Chat(config.gateway, fleet, self._scheduler, self._tokens)
        self._trace = Trace(config.gateway.trace) if config.gateway.trace.file else None
        self._sglang = SglangGenerate(self._completions, fleet)
        self._sglang_control = SglangControl(
            fleet, self._scheduler, self._weights, self._sglang, self._model_description
        )

        self._dashboard = Dashboard(config.fleet, fleet, self._scheduler, self._weights, metrics, self.status)

    def application(self) -> web.Application:
        app = web.Application(
            client_max_size=self._config.gateway.max_body_bytes, middlewares=[self._measure, self._answer_errors]
        )
        get, post = app.router.add_get, app.router.add_post
        get("/health", self._health)
        get("/ping", self._health)
        get("/status", self._for_inference(self._status))
        get("/metrics", self._for_inference(self._metrics_page))
        get("/v1/models", self._for_inference(self._list_models))
        get("/v1/models/{model:.+}", self._for_inference(self._retrieve_model))
        get("/version", self._for_inference(self._pass_through))
        get("/server_info", self._for_inference(self._server_info))
        post("/tokenize", self._for_inference(self._pass_through))
        post("/detokenize", self._for_inference(self._pass_through))
        post("/v1/completions", self._for_inference(self._create_completions))
        post("/v1/chat/completions", self._for_inference(self._create_chat_completion))
        post("/v1/completions/render", self._for_inference(self._render))
        post("/v1/chat/completions/render", self._for_inference(self._render))
        post("/inference/v1/generate", self._for_inference(self._generate_tokens))
        post("/inference/v1/abort_requests", self._for_inference(self._abort_requests))
        post("/generate", self._for_inference(self._generate_in_sglangs_words))
        get("/health_generate", self._for_inference(self._health_generate))
        get("/model_info", self._for_inference(self._model_info))
        get("/get_model_info", self._for_inference(self._model_info))
        for path, handler in self._snapshot_files.routes.items():
            get(path, self._for_store(handler))
        post("/v1/load_lora_adapter", self._for_admin(self._load_adapter))
        post("/v1/unload_lora_adapter", self._for_admin(self._unload_adapter))
        guards = Guards(self._for_inference, self._for_admin)
        self._weight_routes.add_routes(app.router, guards)
        self._sglang_control.add_routes(app.router, guards)
        self._dashboard.add_routes(app.router, guards)
        if self._config.gateway.trl_legacy:
            legacy = TrlLegacy(self._fleet, self._weights, self._completions, self._chat)
            legacy.add_routes(app.router, guards)
        app.cleanup_ctx.append(self._watching)
        return app

    async def _watching(self, app: web.Application) -> AsyncGenerator[None]:
        await self._snapshots.open()
        if self._snapshots.is_open:
            self._fleet.events.keep_in(self._snapshots.folder)
        self._fleet.events.add("gateway", "started")
        await self._fleet.look()
        tasks = [
            asyncio.create_task(self._fleet.run(), name="watch fleet"),
            asyncio.create_task(self._weights.run(), name="watch update"),
            asyncio.create_task(self._adapters.run(), name="watch adapters"),
            asyncio.create_task(self._dashboard.run(), name="watch load"),
        ]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._snapshots.close()
        if self._trace is not None:
            await asyncio.to_thread(self._trace.close)

    # Open routes

    async def _health(self, request: web.Request) -> web.Response:
        """200 once the fleet is complete. Until then 503, which TRL waits on. The report needs a key."""
        ready = self._fleet.is_ready
        is_known = self._access.admits(direct_peer(request), request.headers.get("Authorization"))
        return reply(self.status() if is_known else {"ready": ready}, 200 if ready else 503)

    # Routes for inference keys

    def status(self) -> Json:
        return status_report(self._fleet, self._scheduler, self._weights, self._snapshots)

    async def _status(self, request: web.Request) -> web.Response:
        return reply(self.status())

    async def _metrics_page(self, request: web.Request) -> web.Response:
        replicas = self._fleet.alive
        pages = await asyncio.gather(
            *(replica.engine.metrics(self._config.fleet.probe_timeout_s) for replica in replicas),
            return_exceptions=True,
        )
        found = {r.label: page for r, page in zip(replicas, pages, strict=True) if isinstance(page, str)}
        queue_lengths = {model: self._scheduler.queue_length(model) for model in self._fleet.models.names}
        self._metrics.observe(self._fleet.replicas, queue_lengths)
        self._metrics.observe_fleet(self._fleet.expected_by_group, self._fleet.losses, is_ready=self._fleet.is_ready)
        return web.Response(body=self._metrics.page(found), content_type="text/plain", charset="utf-8")

    async def _list_models(self, request: web.Request) -> web.Response:
        """What an engine of each model says of it, the policy first: TRL takes the first for its own."""
        first = self._fleet.models.first
        others = (self._model_card_if_up(model) for model in self._fleet.models.names if model != first)
        base, *cards = await asyncio.gather(self._model_card(first), *others)
        adapters = [_adapter_card(adapter, base) for adapter in self._fleet.adapters.loaded if base]
        return reply({"object": "list", "data": [*(card for card in (base, *cards) if card), *adapters]})

    async def _retrieve_model(self, request: web.Request) -> web.Response:
        model, adapter = self._fleet.asked(request.match_info["model"])
        card = await self._model_card(model)
        return reply(_adapter_card(adapter, card) if adapter else card)

    async def _pass_through(self, request: web.Request) -> web.Response:
        """What one engine says, all engines of its model would say."""
        body = await read_object(request) if request.method == "POST" else None
        model, adapter = (self._fleet.models.first, None) if body is None else self._fleet.asked(body.get("model"))
        replica = self._any_replica(model, adapter)
        return reply(await replica.engine.ask(request.method, request.path_qs, body, _ASK_TIMEOUT_S))

    async def _server_info(self, request: web.Request) -> web.Response:
        """As an engine has it, but for what trainers send over where the relay receives."""
        replica = self._any_replica(self._fleet.models.first, None)
        info = await replica.engine.ask("GET", request.path_qs, None, _ASK_TIMEOUT_S)
        if isinstance(info.get("vllm_config"), dict) and (backend := await self._weights.backend()):
            info["vllm_config"]["weight_transfer_config"] = {"backend": backend}
        return reply(info)

    async def _create_completions(self, request: web.Request) -> web.StreamResponse:
        body, session = await self._asked(request)
        prompts = self._completions.decode(body, _request_id(request), session)
        if body.get("stream"):
            return await self._stream(request, prompts[0].rollout.model, partial(self._completions.stream, prompts))
        answer = await self._completions.generate(prompts)
        self._count_tokens(request, prompts[0].rollout.model, answer.get("usage"))
        return reply(answer)

    async def _create_chat_completion(self, request: web.Request) -> web.StreamResponse:
        body, session = await self._asked(request)
        rollout = self._chat.decode(body, _request_id(request), session)
        if body.get("stream"):
            return await self._stream(request, rollout.model, partial(self._chat.stream, rollout, body))
        answer = await self._chat.generate(rollout, body)
        self._count_tokens(request, rollout.model, answer.get("usage"))
        return reply(answer)

    async def _asked(self, request: web.Request) -> tuple[Json, str]:
        """The body of a request for tokens, and its session."""
        at, began = time.time(), time.monotonic()
        body = await read_object(request)
        session = session_of(request.headers, body)
        if self._trace is not None:
            request[_ARRIVAL] = Arrival(request.path, body, session, at, began)
        return body, session

    async def _render(self, request: web.Request) -> web.Response:
        """The token ids and sampling parameters of a request, for /inference/v1/generate."""
        body = await read_object(request)
        model, _ = self._fleet.asked(body.get("model"))
        replicas = [replica for replica in self._fleet.alive if replica.info.model == model]
        replica = next((replica for replica in replicas if request.path in replica.info.capabilities), None)
        if replica is None:
            raise lacking(request.path, replicas)
        return reply(await replica.engine.ask("POST", request.path, body, _ASK_TIMEOUT_S))

    async def _generate_tokens(self, request: web.Request) -> web.StreamResponse:
        body, session = await self._asked(request)
        rollout = self._tokens.decode(body, _request_id(request), session)
        if body.get("stream"):
            return await self._stream(request, rollout.model, partial(self._tokens.stream, rollout, body))
        answer = await self._tokens.generate(rollout, body)
        self._count_tokens(request, rollout.model, answer.get("usage"))
        return reply(answer)

    async def _abort_requests(self, request: web.Request) -> web.Response:
        await self._tokens.abort((await read_object(request)).get("request_ids"))
        return reply({})

    async def _generate_in_sglangs_words(self, request: web.Request) -> web.StreamResponse:
        body, session = await self._asked(request)
        batch = self._sglang.decode(body, _request_id(request), session)
        if body.get("stream"):
            return await self._stream(request, batch.model, partial(self._sglang.stream, batch))
        answers, counted = await self._sglang.generate(batch)
        self._count_tokens(request, batch.model, counted)
        return reply(answers)

    async def _health_generate(self, request: web.Request) -> web.Response:
        """SGLang's check that tokens come out: 200 when one did."""
        prompts = self._completions.decode({"prompt": "a", "max_tokens": 1}, _request_id(request))
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                await self._completions.generate(prompts)
        except (TimeoutError, EngineError, DeadlineExceeded) as error:
            why = str(error) or f"no token within {_HEALTH_TIMEOUT_S:g} s"
            return reply(error_body(f"{why}: see /status", 503), 503)
        return reply({})

    async def _model_info(self, request: web.Request) -> web.Response:
        return reply(await self._model_description())

    async def _model_description(self) -> Json:
        """SGLang's description of the policy."""
        card = await self._model_card(self._fleet.models.first)
        path = card.get("root") or card["id"]
        described = {"model_path": path, "tokenizer_path": path, "is_generation": True}
        return described | {"preferred_sampling_params": None, "weight_version": str(self._fleet.version)}

    # Routes for admin keys

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await read_object(request)
        in_place = body.get("load_inplace", False)
        if type(in_place) is not bool:
            raise InvalidRequest(f"load_inplace = {in_place!r} is neither true nor false", param="load_inplace")
        if body.get("is_3d_lora_weight"):
            raise InvalidRequest("is_3d_lora_weight is not passed on to engines", param="is_3d_lora_weight")
        name = _text(body, "lora_name")
        await self._adapters.load(name, _text(body, "lora_path"), in_place=in_place)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = _text(await read_object(request), "lora_name")
        await self._adapters.unload(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    # What every route passes

    def _for_inference(self, handler: Handler) -> Handler:
        return self._guarded(handler, admin=False)

    def _for_admin(self, handler: Handler) -> Handler:
        return self._guarded(handler, admin=True)

    def _for_store(self, handler: Handler) -> Handler:
        """For admin keys, and for the one that engines have."""
        for_admin = self._for_admin(handler)

        async def guarded(request: web.Request) -> web.StreamResponse:
            opens = self._access.opens_store(request.headers.get("Authorization"))
            return await (handler if opens else for_admin)(request)

        return guarded

    def _guarded(self, handler: Handler, *, admin: bool) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            self._access.check(direct_peer(request), request.headers.get("Authorization"), admin=admin)
            return await handler(request)

        return guarded

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The one door where our errors become replies in the client's dialect."""
        try:
            return await handler(request)
        except RolloutGatewayError as error:
            return _error_reply(error)
        except web.HTTPException as error:
            return reply(error_body(f"{request.method} {request.path}: {error.reason}", error.status), error.status)

    @web.middleware
    async def _measure(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route, began = resource.canonical if resource else "unknown", time.monotonic()
        status = 499  # the client left before there was an answer
        request[_USAGE] = {}
        try:
            response = await handler(request)
            status = response.status
            if _REQUEST_ID in request.headers and not response.prepared:
                response.headers[_REQUEST_ID] = request.headers[_REQUEST_ID]
            return response
        finally:
            self._metrics.requests.labels(route, status).inc()
            self._metrics.request_seconds.labels(route).observe(time.monotonic() - began)
            if self._trace is not None and (arrival := request.get(_ARRIVAL)) is not None:
                self._trace.ended(arrival, status, request[_USAGE])

    async def _stream(
        self, request: web.Request, model: str, chunks: Callable[[Usage], AsyncGenerator[Json]]
    ) -> web.StreamResponse:
        """Send what comes; its tokens are counted also where the client leaves in the middle."""
        usage = Usage()
        try:
            return await _send_events(request, chunks(usage))
        finally:
            self._count_tokens(request, model, usage.total())

    def _count_tokens(self, request: web.Request, model: str, usage: Json | None) -> None:
        usage = usage or {}
        request[_USAGE] = usage
        self._metrics.prompt_tokens.labels(model).inc(usage.get("prompt_tokens") or 0)
        self._metrics.completion_tokens.labels(model).inc(usage.get("completion_tokens") or 0)

    async def _model_card(self, model: str) -> Json:
        """vLLM's entry of one model in the list that its engine gives."""
        replica = self._any_replica(model)
        listed = await replica.engine.ask("GET", "/v1/models", None, self._config.fleet.probe_timeout_s)
        for card in listed.get("data") or ():
            if card.get("id") == model:
                return dict(card)
        raise EngineFailed(f"/v1/models lists {model!r} no longer", replica_id=replica.replica_id)

    async def _model_card_if_up(self, model: str) -> Json | None:
        """A judge that is away keeps nobody from the policy."""
        try:
            return await self._model_card(model)
        except (EngineError, DeadlineExceeded) as error:
            log.warning("model not listed", model=model, error=str(error))
            return None

    def _any_replica(self, model: str, adapter: Adapter | None = None) -> Replica:
        of_model = [replica for replica in self._fleet.alive if replica.info.model == model]
        replica = next(iter(self._fleet.serving(model, adapter) or of_model), None)
        if replica is None:
            raise DeadlineExceeded(f"no replica of {model!r} is up yet: see /health")
        return replica


async def _send_events(request: web.Request, chunks: AsyncGenerator[Json]) -> web.StreamResponse:
    """Server-sent events. The head is sent with the first chunk, so that an error before it keeps its status."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    if _REQUEST_ID in request.headers:
        response.headers[_REQUEST_ID] = request.headers[_REQUEST_ID]
    try:
        async for chunk in chunks:
            if not response.prepared:
                await response.prepare(request)
            await response.write(event(chunk))
    except RolloutGatewayError as error:
        if not response.prepared:
            raise
        await response.write(event(body_of(error)))
    finally:
        await chunks.aclose()
    if not response.prepared:
        await response.prepare(request)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _adapter_card(adapter: Adapter, base: Json) -> Json:
    """As vLLM lists an adapter: its folder as root, the model beneath as parent."""
    own = {"id": adapter.name, "root": adapter.path, "parent": base["id"], "max_model_len": None}
    return {**base, **own}


def _error_reply(error: RolloutGatewayError) -> web.Response:
    status = status_of(error)
    if isinstance(error, EngineError | WeightUpdateFailed | DeadlineExceeded) and not isinstance(error, EngineRefused):
        log.warning("request failed", status=status, error=str(error))
    return reply(body_of(error), status)


def _checkpoint(config: Config) -> Path | None:
    """The checkpoint of the policy, where this machine has it."""
    ours = (group for group in config.groups.values() if not group.frozen)
    return next(filter(None, map(model_folder, ours)), None)


def _text(body: Json, key: str) -> str:
    text = body.get(key)
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"the body needs {key!r}, a text that is not empty; it is {text!r}", param=key)
    return text


def _request_id(request: web.Request) -> str:
    return request.headers.get(_REQUEST_ID) or uuid.uuid4().hex
