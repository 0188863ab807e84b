"""The simulated engine: a server process with vLLM's HTTP routes, and made-up tokens at a configured speed.

`python -m sim.server --port 8000 --model sim` replaces `vllm serve` in tests of scale and failure.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import orjson
import uvloop
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ValidationError

from engines.config import SimConfig
from engines.errors import InvalidRequest, StoreFailed, UnknownModel, WeightUpdateConflict
from engines.types import PauseMode
from engines.weight_label import CHECKPOINT, WeightLabel
from sim.adapters import AdapterNotFound, SimAdapters
from sim.dialect import (
    Adapter,
    Answer,
    ChatAnswer,
    ChatBody,
    CompletionAnswer,
    CompletionBody,
    Cursor,
    DerenderBody,
    Json,
    Limits,
    TokenId,
    TokensAnswer,
    TokensBody,
    chat_ids,
    derendered,
    rendered,
)
from sim.faults import FaultInjector
from sim.metrics import SchedulerMetrics
from sim.model import SimModel, detokenize, tokenize, version_name
from sim.scheduler import BATCHED_TOKENS, SimScheduler
from sim.weights import WeightSession
from sim.worker import SimWorker

VERSION = "0.32.0+sim"

_MAX_BODY_BYTES = 1 << 30
_MAX_MODEL_LEN = 32768
_SHUTDOWN_S = 0.1
Body = TypeVar("Body", bound=BaseModel)
ModelBody = TypeVar("ModelBody", "TokenizeBody", "DetokenizeBody", CompletionBody, ChatBody, TokensBody, DerenderBody)


class InitBody(BaseModel):
    init_info: Json


class UpdateBody(BaseModel):
    update_info: Json | list[Json]


class FinishBody(BaseModel):
    weight_version: str | None = None


class VersionBody(BaseModel):
    new_version: str


class RpcBody(BaseModel):
    method: str
    kwargs: Json = {}


class TokenizeBody(BaseModel):
    model: str | None = None
    prompt: str | None = None
    messages: list[Json] | None = None


class DetokenizeBody(BaseModel):
    model: str | None = None
    tokens: list[TokenId]


class LoadAdapterBody(BaseModel):
    lora_name: str
    lora_path: str


class UnloadAdapterBody(BaseModel):
    lora_name: str


class SimServer:
    """The routes of one simulated engine."""

    def __init__(
        self,
        model_name: str,
        sim: SimConfig,
        limits: Limits,
        *,
        max_num_seqs: int,
        world_size: int,
        max_num_batched_tokens: int = BATCHED_TOKENS,
        adapters: SimAdapters | None = None,
    ) -> None:
        self._name = model_name
        self._last_held = CHECKPOINT
        self.adapters = adapters
        self.corrupt_after = sim.corrupt_after
        self._corrupt = sim.corrupt
        self.corrupt_loads = sim.corrupt_loads
        self._load_s = sim.load_s
        self._num_updates = 0
        self._limits = limits
        self._world_size = world_size
        self._model = SimModel.of(sim)
        self.scheduler = SimScheduler(sim, self._model, max_num_seqs, max_num_batched_tokens)
        self.worker = SimWorker(model_name, sim.tensors, sim.stage_bytes)
        self.injector = FaultInjector()
        self.scheduler.is_wedged = lambda: self.injector.faults.stops_tokens
        self._weights = WeightSession(sim.tensors, world_size, self.worker)
        self._registry = CollectorRegistry()
        self._registry.register(SchedulerMetrics(self.scheduler, model_name, sim.kv_tokens))
        self._started = int(time.time())
        self._next_prompt_number = 0
        self._generation: asyncio.Task[None] | None = None

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_vllm_errors, self.injector.inject], client_max_size=_MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._generate)
        if self.adapters is not None:
            app.router.add_post("/v1/load_lora_adapter", self.load_lora_adapter)
            app.router.add_post("/v1/unload_lora_adapter", self.unload_lora_adapter)
        app.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
                web.post("/inference/v1/generate", self.generate_tokens),
                web.post("/v1/chat/completions/render", self.render),
                web.post("/v1/chat/completions/derender", self.derender),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.get("/version", self.version),
                web.get("/openapi.json", self.openapi),
                web.put("/faults", self.injector.put),
                web.get("/metrics", self.metrics),
                web.get("/server_info", self.server_info),
                web.get("/get_world_size", self.world_size),
                web.post("/pause", self.pause),
                web.post("/resume", self.resume),
                web.get("/is_paused", self.is_paused),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
                web.post("/reset_encoder_cache", self.reset_encoder_cache),
                web.post("/init_weight_transfer_engine", self.init_weight_transfer_engine),
                web.post("/shutdown_weight_transfer_engine", self.shutdown_weight_transfer_engine),
                web.post("/start_weight_update", self.start_weight_update),
                web.post("/update_weights", self.update_weights),
                web.post("/finish_weight_update", self.finish_weight_update),
                web.post("/update_weight_version", self.update_weight_version),
                web.post("/collective_rpc", self.collective_rpc),
                web.get("/weight_info", self.weight_info),
            ]
        )
        return app

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request, CompletionBody)
        adapter = self._adapter(body.model)
        return await self._reply(request, CompletionAnswer(body, self._model, self._name, self._limits, adapter))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request, ChatBody)
        adapter = self._adapter(body.model)
        return await self._reply(request, ChatAnswer(body, self._model, self._name, self._limits, adapter))

    async def generate_tokens(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request, TokensBody)
        adapter = self._adapter(body.model)
        return await self._reply(request, TokensAnswer(body, self._model, self._name, self._limits, adapter))

    async def render(self, request: web.Request) -> web.Response:
        return _json(rendered(await self._read(request, ChatBody), self._limits.max_model_len))

    async def derender(self, request: web.Request) -> web.Response:
        return _json(derendered(await self._read(request, DerenderBody), self._name))

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await self._read(request, TokenizeBody)
        if body.prompt is None and body.messages is None:
            raise InvalidRequest("Either prompt or messages must be provided.", param="prompt")
        tokens = tokenize(body.prompt or "") if body.messages is None else chat_ids(body.messages)
        longest = self._limits.max_model_len
        return _json({"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": None})

    async def detokenize(self, request: web.Request) -> web.Response:
        return _json({"prompt": detokenize((await self._read(request, DetokenizeBody)).tokens)})

    async def models(self, _: web.Request) -> web.Response:
        card = {"id": self._name, "object": "model", "created": self._started, "owned_by": "vllm"}
        card |= {"root": self._name, "parent": None, "max_model_len": self._limits.max_model_len}
        adapters = self.adapters.listed if self.adapters else ()
        others = [card | {"id": a.name, "root": a.path, "parent": self._name, "max_model_len": None} for a in adapters]
        return _json({"object": "list", "data": [card, *others]})

    async def load_lora_adapter(self, request: web.Request) -> web.Response:
        assert self.adapters is not None
        body = await _body(request, LoadAdapterBody)
        if body.lora_name == self._name:
            raise InvalidRequest(f"The lora adapter '{body.lora_name}' conflicts with a served base model.")
        self.adapters.load(body.lora_name, body.lora_path)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_lora_adapter(self, request: web.Request) -> web.Response:
        assert self.adapters is not None
        body = await _body(request, UnloadAdapterBody)
        self.adapters.unload(body.lora_name)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._generation and not self._generation.done() else 503)

    async def version(self, _: web.Request) -> web.Response:
        return _json({"version": VERSION})

    async def openapi(self, request: web.Request) -> web.Response:
        paths: Json = {resource.canonical: {} for resource in request.app.router.resources()}
        return _json({"openapi": "3.1.0", "paths": paths})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def server_info(self, request: web.Request) -> web.Response:
        model_config = {"model": self._name, "dtype": "torch.bfloat16", "logprobs_mode": "processed_logprobs"}
        config = {
            "model_config": model_config | {"max_model_len": self._limits.max_model_len, "max_logprobs": -1},
            "parallel_config": {"data_parallel_size": 1, "world_size": self._world_size},
            "weight_transfer_config": {"backend": "sim"},
            "lora_config": self.adapters and self.adapters.config,
        }
        as_json = request.query.get("config_format") == "json"
        return _json({"vllm_config": config if as_json else str(config), "vllm_env": {}, "system_env": {}})

    async def world_size(self, _: web.Request) -> web.Response:
        return _json({"world_size": self._world_size})

    async def pause(self, request: web.Request) -> web.Response:
        try:
            mode = PauseMode(request.query.get("mode", PauseMode.ABORT))
        except ValueError as error:
            raise InvalidRequest(str(error), param="query.mode") from error
        await self.scheduler.pause(mode, _flag(request, "clear_cache", default=True))
        return _json({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        self.scheduler.resume()
        return _json({"status": "resumed"})

    async def is_paused(self, _: web.Request) -> web.Response:
        return _json({"is_paused": self.scheduler.paused is not None})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        preempt = _flag(request, "reset_running_requests", default=False)
        return _json({"success": self.scheduler.reset_prefix_cache(preempt=preempt)})

    async def reset_encoder_cache(self, _: web.Request) -> web.Response:
        return web.Response()  # it reads no images

    async def init_weight_transfer_engine(self, request: web.Request) -> web.Response:
        self._weights.open_group((await _body(request, InitBody)).init_info)
        return _json({"message": "Weight transfer initialized"})

    async def shutdown_weight_transfer_engine(self, _: web.Request) -> web.Response:
        self._weights.close_group()
        return _json({"message": "Weight transfer shut down"})

    async def start_weight_update(self, _: web.Request) -> web.Response:
        self._weights.start()
        return _json({"message": "Weight update started"})

    async def update_weights(self, request: web.Request) -> web.Response:
        self._weights.update((await _body(request, UpdateBody)).update_info)
        return _json({"message": "Weights updated"})

    async def finish_weight_update(self, request: web.Request) -> web.Response:
        asked = await _body(request, FinishBody) if request.body_exists else FinishBody()
        self._weights.finish()
        self._take(asked.weight_version or str(WeightLabel.read(self.scheduler.version).version + 1))
        return _json({"message": "Weight update finished"})

    def _take(self, label: str) -> None:
        """Hold the version of the label, or only report it if `corrupt_after` is reached."""
        after, weights, held = self.corrupt_after, self._model.held, WeightLabel.read(label).held
        if after is not None and self._num_updates >= after:
            weights[held] = self._weights_before() if self._corrupt == "previous" else self._garbage()
        self._num_updates += 1
        self._last_held = held
        self.scheduler.hold_version(label)

    async def update_weight_version(self, request: web.Request) -> web.Response:
        label = (await _body(request, VersionBody)).new_version
        loaded = self._model.held.pop("", None)
        if held := WeightLabel.read(label).held:
            self._last_held = held
            self._model.held.update({held: loaded} if loaded else {})
        self.scheduler.hold_version(label)
        return _json({"success": True, "new_version": label})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        asked = await _body(request, RpcBody)
        return _json({"results": [await self._on_workers(asked.method, asked.kwargs)] * self._world_size})

    async def _on_workers(self, method: str, arguments: Json) -> Any:
        match method:
            case "corrupt_loads":  # as `SimConfig.corrupt_loads`, from now on
                self.corrupt_loads = bool(arguments["on"])
            case "end_update":
                await self._on_workers("drop_receipt", {})
                self._weights.break_off()
            case "stage_weights":
                self._weights.receive(arguments["update_info"])
            case "staged":
                return {"ready": True}
            case "load_staged":
                self._weights.load_staged()
            case "load_snapshot":
                await self.worker.call(method, arguments)
                await asyncio.sleep(self._load_s)
                self._weights.break_off()
                self._hold(self._garbage() if self.corrupt_loads else version_name(arguments["version"]))
            case _:
                return await self.worker.call(method, arguments)
        return None

    def _hold(self, weights: str) -> None:
        """Hold these weights as of no version, and under the next label."""
        self._model.held.clear()
        self._model.held[""] = weights

    def _weights_before(self) -> str:
        """The weights under the last label of a version."""
        return self._model.weights(self._last_held)

    def _garbage(self) -> str:
        return f"garbage of {self._limits.seed}"

    async def weight_info(self, _: web.Request) -> web.Response:
        return _json({"weight_version": self.scheduler.version})

    async def _generate(self, _: web.Application) -> AsyncIterator[None]:
        self._generation = asyncio.create_task(self.scheduler.run())
        yield
        self._generation.cancel()
        with suppress(asyncio.CancelledError):
            await self._generation

    async def _read(self, request: web.Request, kind: type[ModelBody]) -> ModelBody:
        """Return the body. Raise `UnknownModel` if its model is not served here."""
        body = await _body(request, kind)
        if body.model and body.model != self._name and self._adapter(body.model) is None:
            raise UnknownModel(f"The model `{body.model}` does not exist. Valid aliases: {self._name}.", param="model")
        return body

    def _adapter(self, model: str | None) -> Adapter | None:
        return self.adapters.get(model) if self.adapters and model else None

    async def _reply(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        answer.fill(self._next_prompt_number)
        self._next_prompt_number += len(answer.prompts)
        self.scheduler.add(answer.samples)
        try:
            return await (_stream(request, answer) if answer.body.stream else _whole(answer))
        finally:
            self.scheduler.abort(answer.samples)  # a disconnected client leaves unfinished samples


async def _whole(answer: Answer) -> web.Response:
    for _ in answer.samples:
        await answer.reports.get()
    return _json(answer.whole())


async def _stream(request: web.Request, answer: Answer) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    cursors = [Cursor(sample) for sample in answer.samples]
    for opening in answer.opening():
        await response.write(_event(opening))
    unfinished = len(cursors)
    while unfinished:
        cursor = cursors[(await answer.reports.get()).index]
        had_ended = cursor.ended
        if (chunk := cursor.next_chunk(answer)) is not None:
            await response.write(_event(chunk))
        unfinished -= cursor.ended and not had_ended
    if answer.body.stream_options and answer.body.stream_options.include_usage:
        await response.write(_event(answer.usage_chunk()))
    await response.write(b"data: [DONE]\n\n")
    return response


def _event(chunk: Json) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _json(content: Json, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


def _flag(request: web.Request, name: str, *, default: bool) -> bool:
    return request.query.get(name, str(default)).lower() in {"true", "1"}


async def _body(request: web.Request, kind: type[Body]) -> Body:
    return kind.model_validate(orjson.loads(await request.read()))


@web.middleware
async def _vllm_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except UnknownModel as error:
        return _error(404, "NotFoundError", str(error), error.param)
    except InvalidRequest as error:
        return _error(400, "BadRequestError", str(error), error.param)
    except (ValidationError, orjson.JSONDecodeError) as error:
        return _error(400, "Bad Request", str(error))
    except AdapterNotFound as error:
        return _error(404, "NotFoundError", str(error))
    except (WeightUpdateConflict, StoreFailed, OSError) as error:
        return _error(500, "InternalServerError", f"Call to collective_rpc method failed: {error}")
    except web.HTTPException as error:
        return _json({"detail": error.reason}, error.status)


def _error(status: int, kind: str, message: str, param: str | None = None) -> web.Response:
    return _json({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sim.server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="sim", help="served model name")
    parser.add_argument("--max-model-len", type=int, help="prompt plus completion; default: 32768")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=BATCHED_TOKENS, help="tokens of a step")
    parser.add_argument("--seed", type=int, default=0, help="seed of requests without one")
    parser.add_argument("--world-size", type=int, default=1, help="ranks in a weight transfer group")
    parser.add_argument("--stream-interval", type=int, default=1, help="minimum tokens per streamed chunk")
    parser.add_argument("--enable-prompt-tokens-details", action="store_true", help="report cached prompt tokens")
    parser.add_argument("--enable-lora", action="store_true", help="take LoRA adapters at run time")
    parser.add_argument("--max-loras", type=int, default=1)
    parser.add_argument("--max-cpu-loras", type=int)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--sim", type=SimConfig.model_validate_json, default=SimConfig(), help="SimConfig as JSON")
    arguments = parser.parse_args()
    if arguments.max_num_seqs > arguments.sim.kv_tokens:
        parser.error(f"--max-num-seqs {arguments.max_num_seqs} do not fit in {arguments.sim.kv_tokens} KV tokens")
    if arguments.max_model_len is None:
        arguments.max_model_len = min(_MAX_MODEL_LEN, arguments.sim.kv_tokens)
    if arguments.max_model_len > arguments.sim.kv_tokens:
        parser.error(f"--max-model-len {arguments.max_model_len} does not fit in {arguments.sim.kv_tokens} KV tokens")
    return arguments


def _adapters(arguments: argparse.Namespace) -> SimAdapters | None:
    if not arguments.enable_lora:
        return None
    return SimAdapters(arguments.max_loras, arguments.max_lora_rank, arguments.max_cpu_loras)


def main() -> None:
    arguments = _arguments()
    limits = Limits(
        max_model_len=arguments.max_model_len,
        seed=arguments.seed,
        stream_interval=arguments.stream_interval,
        shows_cached_tokens=arguments.enable_prompt_tokens_details,
        logprob_noise=arguments.sim.logprob_noise,
    )
    server = SimServer(
        arguments.model,
        arguments.sim,
        limits,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        world_size=arguments.world_size,
        adapters=_adapters(arguments),
    )
    time.sleep(arguments.sim.start_s)  # like vLLM, refuses connections during the load
    web.run_app(
        server.app(),
        host=arguments.host,
        port=arguments.port,
        loop=uvloop.new_event_loop(),
        print=None,
        access_log=None,
        shutdown_timeout=_SHUTDOWN_S,
        handler_cancellation=True,
    )


if __name__ == "__main__":
    main()
