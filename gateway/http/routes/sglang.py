"""SGLang's router routes beside /generate: workers, aborts, caches, pauses.

The engines' own ports are on loopback, so the gateway lists itself as the only worker, and calls to it reach every
replica.
"""

from dataclasses import dataclass
from functools import partial

from aiohttp import web

from engines.errors import InvalidRequest
from engines.types import PauseMode
from gateway.dialects.sampling import check_id
from gateway.dialects.sglang import SglangGenerate
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.scheduler import Scheduler
from gateway.http.access import Access, Handler, OwnRequests
from gateway.http.json_body import read_object, reply
from gateway.weights.coordinator import WeightCoordinator

_MODES = {"abort": PauseMode.ABORT, "in_place": PauseMode.KEEP, "retract": PauseMode.KEEP}


@dataclass(eq=False)
class SglangRoutes:
    """SGLang's own routes."""

    fleet: Fleet
    scheduler: Scheduler
    weights: WeightCoordinator
    generate: SglangGenerate
    own: OwnRequests

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        self._access = access
        router.add_get("/workers", access.for_inference(self._workers))
        abort_all = access.for_admin(self._abort_all)
        router.add_post("/abort_request", access.for_inference(partial(self._abort_request, abort_all)))
        for method in ("GET", "POST"):
            router.add_route(method, "/flush_cache", access.for_admin(self._flush_cache))
        router.add_post("/pause_generation", access.for_admin(self._pause_generation))
        router.add_post("/continue_generation", access.for_admin(self._continue_generation))

    async def _workers(self, request: web.Request) -> web.Response:
        worker = {
            "id": self.fleet.models.first,
            "url": f"{request.scheme}://{request.host}",  # as this client reaches it
            "model_id": self.fleet.models.first,
            "worker_type": "regular",
            "connection_type": "http",
            "is_healthy": self.fleet.is_ready,
            "load": sum(replica.load_samples for replica in self.fleet.trained),
        }
        stats = {"prefill_count": 0, "decode_count": 0, "regular_count": 1}
        return reply({"workers": [worker], "total": 1, "stats": stats})

    async def _abort_request(self, abort_all: Handler, request: web.Request) -> web.StreamResponse:
        """End running rollouts with the tokens they have, all of them with `abort_all`, or one request with `rid`.

        `abort_all` needs an admin key: it reaches the rollouts of all clients. An inference key ends its own requests.
        """
        body = await read_object(request)
        if body.get("abort_all") is True:
            return await abort_all(request)
        rid = body.get("rid")
        if not isinstance(rid, str) or not rid:
            raise InvalidRequest(f"rid = {rid!r:.80}: send the id of a request, or abort_all = true", param="rid")
        check_id(rid, "rid")
        for client in self.own.named(request, self._access, rid):
            self.generate.abort(client, rid)
        return web.Response()

    async def _abort_all(self, request: web.Request) -> web.Response:
        """Pause the engines, which ends their rollouts; then end the rollouts that wait for a replica."""
        async with self.weights.pauses.aborting_all():
            self.scheduler.withdraw_policy()
        return web.Response()

    async def _flush_cache(self, request: web.Request) -> web.Response:
        if await self.weights.pauses.reset_prefix_cache():
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed: rollouts run.\n", status=400)

    async def _pause_generation(self, request: web.Request) -> web.Response:
        mode = (await read_object(request, required=False)).get("mode", "abort")
        if not isinstance(mode, str) or mode not in _MODES:
            raise InvalidRequest(f"mode = {mode!r} is none of {', '.join(_MODES)}", param="mode")
        await self.weights.pauses.pause(_MODES[mode], clear_cache=mode == "retract")
        return reply({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, request: web.Request) -> web.Response:
        await self.weights.pauses.resume()
        return reply({"message": "Generation continued successfully.", "status": "ok"})
