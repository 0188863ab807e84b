"""vLLM's routes that load and unload LoRA adapters, on all replicas."""

from dataclasses import dataclass
from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct

from engines.errors import InvalidRequest
from gateway.dialects.fields import read_fields
from gateway.fleet.adapter_loading import AdapterCoordinator
from gateway.http.access import Access
from gateway.http.json_body import read_object

_Text = Annotated[str, Meta(min_length=1)]


class _Load(Struct):
    lora_name: _Text
    lora_path: _Text
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class _Unload(Struct):
    lora_name: _Text


@dataclass(eq=False)
class AdapterRoutes:
    """LoRA adapters on all replicas, in vLLM's dialect."""

    adapters: AdapterCoordinator

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        router.add_post("/v1/load_lora_adapter", access.for_admin(self._load))
        router.add_post("/v1/unload_lora_adapter", access.for_admin(self._unload))

    async def _load(self, request: web.Request) -> web.Response:
        """Load a LoRA adapter from a folder on all replicas."""
        asked = read_fields(_Load, await read_object(request))
        if asked.is_3d_lora_weight:
            raise InvalidRequest(
                "is_3d_lora_weight is not passed on to engines: leave it out", param="is_3d_lora_weight"
            )
        await self.adapters.load(asked.lora_name, asked.lora_path, in_place=asked.load_inplace)
        return web.Response(text=f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        """Unload a LoRA adapter from all replicas, after the rollouts that use it."""
        name = read_fields(_Unload, await read_object(request)).lora_name
        await self.adapters.unload(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")
