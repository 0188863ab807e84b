"""Routes about models and their engines: cards, descriptions, LoRA adapters, calls that any engine of a model can
answer."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import structlog
from aiohttp import web
from msgspec import Meta, Struct

from engines.engine import Json
from engines.errors import DeadlineExceeded, EngineError, EngineFailed, InvalidRequest
from gateway.config.schema import FleetConfig
from gateway.dialects.fields import read_fields
from gateway.dialects.token_generation import lacking
from gateway.fleet.adapter_loading import AdapterCoordinator
from gateway.fleet.adapters import Adapter
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.any_replica import AnyReplica
from gateway.fleet.replica import Replica
from gateway.http.access import Access
from gateway.http.json_body import read_object, reply
from gateway.weights.coordinator import WeightCoordinator

log = structlog.get_logger()

_ASK_TIMEOUT_S = 60.0
_Text = Annotated[str, Meta(min_length=1)]


class _Load(Struct):
    lora_name: _Text
    lora_path: _Text
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class _Unload(Struct):
    lora_name: _Text


@dataclass(eq=False)
class ModelRoutes:
    """Model cards, LoRA adapters on all replicas, and calls that are passed to one engine of the model."""

    config: FleetConfig
    fleet: Fleet
    weights: WeightCoordinator
    any_replica: AnyReplica
    adapters: AdapterCoordinator

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        for of_session in ("", "/sessions/{session}"):
            router.add_get(f"{of_session}/v1/models", access.for_agents(self._list_models))
            router.add_get(f"{of_session}/v1/models/{{model:.+}}", access.for_agents(self._retrieve_model))
        router.add_get("/version", access.for_inference(self._pass_through), allow_head=False)
        router.add_get("/tokenizer_info", access.for_inference(self._pass_through), allow_head=False)
        router.add_get("/server_info", access.for_inference(self._server_info), allow_head=False)
        router.add_post("/tokenize", access.for_inference(self._pass_through))
        router.add_post("/detokenize", access.for_inference(self._pass_through))
        router.add_post("/v1/completions/render", access.for_inference(self._render))
        router.add_post("/v1/chat/completions/render", access.for_inference(self._render))
        router.add_post("/v1/load_lora_adapter", access.for_admin(self._load_adapter))
        router.add_post("/v1/unload_lora_adapter", access.for_admin(self._unload_adapter))

    async def _list_models(self, request: web.Request) -> web.Response:
        """Reply with the card of each model, the policy first: TRL uses the first card."""
        first = self.fleet.models.first
        others = (self._model_card_if_up(model) for model in self.fleet.models.names if model != first)
        base, *cards = await asyncio.gather(self._model_card(first), *others)
        adapters = [_adapter_card(adapter, base) for adapter in self.fleet.adapters.loaded if base]
        return reply({"object": "list", "data": [*(card for card in (base, *cards) if card), *adapters]})

    async def _retrieve_model(self, request: web.Request) -> web.Response:
        model, adapter = self.fleet.asked(request.match_info["model"])
        card = await self._model_card(model)
        return reply(_adapter_card(adapter, card) if adapter else card)

    async def _pass_through(self, request: web.Request) -> web.Response:
        """Reply with the answer of one engine; all engines of its model would give the same."""
        body = await read_object(request) if request.method == "POST" else None
        name = None if body is None else body.get("model") or None
        model, adapter = (self.fleet.models.first, None) if body is None else self.fleet.asked(name)
        return reply(await self._answer(self._replicas(model, adapter), request, body))

    async def _server_info(self, request: web.Request) -> web.Response:
        """Reply with an engine's own report, and with the relay's transport for the trainer if the relay receives."""
        info = await self._answer(self._replicas(self.fleet.models.first, None), request, None)
        if isinstance(info.get("vllm_config"), dict) and (backend := await self.weights.backend()):
            info["vllm_config"]["weight_transfer_config"] = {"backend": backend}
        return reply(info)

    async def _render(self, request: web.Request) -> web.Response:
        """Reply with the token ids and sampling parameters of a request, for /inference/v1/generate."""
        body = await read_object(request)
        model, _ = self.fleet.asked(body.get("model") or None)
        replicas = self.fleet.alive_of(model)
        able = [replica for replica in replicas if request.path in replica.info.capabilities]
        if not able:
            raise lacking(request.path, replicas)
        answer = await self._answer(able, request, body)
        return reply(answer["value"] if answer.keys() == {"value"} else answer)  # a list is wrapped by the client

    async def _load_adapter(self, request: web.Request) -> web.Response:
        """Load a LoRA adapter from a folder on all replicas."""
        asked = read_fields(_Load, await read_object(request))
        for field in ("load_inplace", "is_3d_lora_weight"):
            if getattr(asked, field):
                raise InvalidRequest(f"{field} is not passed on to engines: leave it out", param=field)
        await self.adapters.load(asked.lora_name, asked.lora_path)
        return web.Response(text=f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        """Unload a LoRA adapter from all replicas, after the rollouts that use it."""
        name = read_fields(_Unload, await read_object(request)).lora_name
        await self.adapters.unload(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _model_card(self, model: str) -> Json:
        """Return vLLM's entry of one model in its engine's list."""
        replicas = self._replicas(model, None)
        listed = await self.any_replica.ask(replicas, "GET", "/v1/models", None, self.config.probe_timeout_s)
        for card in listed.get("data") or ():
            if card.get("id") == model:
                return dict(card)
        raise EngineFailed(f"/v1/models lists {model!r} no longer")

    async def _model_card_if_up(self, model: str) -> Json | None:
        """Return None where no engine of the model answers: a judge that is down must not hide the policy."""
        try:
            return await self._model_card(model)
        except (EngineError, DeadlineExceeded) as error:
            log.warning("model not listed", model=model, error=str(error))
            return None

    async def _answer(self, replicas: Sequence[Replica], request: web.Request, body: Json | None) -> Json:
        """Return the answer of one of these replicas to the request itself."""
        return await self.any_replica.ask(replicas, request.method, request.path_qs, body, _ASK_TIMEOUT_S)

    def _replicas(self, model: str, adapter: Adapter | None) -> Sequence[Replica]:
        """Return the replicas of a model in a fixed order, serving replicas if any.

        Raise `DeadlineExceeded` if there is none.
        """
        of_model = self.fleet.alive_of(model)
        serving = self.fleet.serving(model, adapter)
        replicas = [replica for replica in of_model if replica in serving] or of_model
        if not replicas:
            raise DeadlineExceeded(f"no replica of {model!r} is up yet: see /health{self.fleet.starts.text}")
        return replicas


def _adapter_card(adapter: Adapter, base: Json) -> Json:
    """Return vLLM's card of an adapter: its folder is the root, the model beneath is the parent."""
    own = {"id": adapter.name, "root": adapter.path, "parent": base["id"], "max_model_len": None}
    return {**base, **own}
