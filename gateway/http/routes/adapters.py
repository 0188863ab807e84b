"""vLLM's routes that load and unload LoRA adapters, on all replicas."""

from aiohttp import web

from engines.engine import Json
from engines.errors import InvalidRequest
from gateway.fleet.adapter_loading import AdapterCoordinator
from gateway.http.access import Access
from gateway.http.json_body import read_object


class AdapterRoutes:
    """LoRA adapters on all replicas, in vLLM's dialect."""

    def __init__(self, adapters: AdapterCoordinator) -> None:
        self._adapters = adapters

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        router.add_post("/v1/load_lora_adapter", access.for_admin(self._load))
        router.add_post("/v1/unload_lora_adapter", access.for_admin(self._unload))

    async def _load(self, request: web.Request) -> web.Response:
        """Load a LoRA adapter from a folder on all replicas."""
        body = await read_object(request)
        in_place = body.get("load_inplace", False)
        if type(in_place) is not bool:
            raise InvalidRequest(f"load_inplace = {in_place!r} is neither true nor false", param="load_inplace")
        if body.get("is_3d_lora_weight"):
            raise InvalidRequest(
                "is_3d_lora_weight is not passed on to engines: leave it out", param="is_3d_lora_weight"
            )
        name = _text(body, "lora_name")
        await self._adapters.load(name, _text(body, "lora_path"), in_place=in_place)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        """Unload a LoRA adapter from all replicas, after the rollouts that use it."""
        name = _text(await read_object(request), "lora_name")
        await self._adapters.unload(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def _text(body: Json, key: str) -> str:
    text = body.get(key)
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"the body needs {key!r}, a text that is not empty; it is {text!r}", param=key)
    return text
