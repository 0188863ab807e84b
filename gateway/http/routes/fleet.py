"""Routes about the gateway and its fleet: health, status, metrics, the attempts of rollouts."""

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import hdrs, web

from engines.engine import Json
from engines.errors import UnknownRequest
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics, package_version
from gateway.fleet.placement.attempt_history import KEPT
from gateway.fleet.placement.scheduler import Scheduler
from gateway.http.access import Access
from gateway.http.json_body import reply
from gateway.http.supervisor import Supervisor

_METHODS = (hdrs.METH_GET, hdrs.METH_POST, hdrs.METH_DELETE)


@dataclass(eq=False)
class FleetRoutes:
    """What is open holds no data of the fleet."""

    fleet: Fleet
    scheduler: Scheduler
    metrics: Metrics
    status: Callable[[], Json]
    tasks: Supervisor

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        self._router = router
        router.add_get("/", self._start)
        router.add_get("/openapi.json", self._document)
        health = access.for_inference_or(self._health_report, self._health)
        router.add_get("/health", health)
        router.add_get("/ping", health)
        router.add_get("/status", access.for_inference(self._report))
        router.add_get("/metrics", access.for_inference(self._metrics_page))
        router.add_get("/traces/{request_id:.+}", access.for_admin(self._life))

    async def _start(self, request: web.Request) -> web.Response:
        text = (
            f"rollout-gateway {package_version()}: one URL in front of inference engines for RL rollouts.\n"
            "/dashboard shows the fleet, /openapi.json lists the routes; /v1/completions, /v1/chat/completions and "
            "vLLM's other routes generate.\n"
        )
        return web.Response(text=text)

    async def _document(self, request: web.Request) -> web.Response:
        """Reply with an OpenAPI document of the paths and their methods, by which clients tell what a server can do.

        Routes that refuse every method are left out.
        """
        paths: dict[str, Json] = {}
        for route in self._router.routes():
            if route.resource is not None and route.method in _METHODS:
                paths.setdefault(route.resource.canonical, {})[route.method.lower()] = {}
        info = {"title": "rollout-gateway", "version": package_version()}
        return reply({"openapi": "3.1.0", "info": info, "paths": dict(sorted(paths.items()))})

    async def _health(self, request: web.Request) -> web.Response:
        """Reply 200 once the fleet is complete, else 503, on which TRL waits. An ended background task gives 503."""
        return reply({"ready": self._is_ready}, self._health_status)

    async def _health_report(self, request: web.Request) -> web.Response:
        return reply(self.status(), self._health_status)

    @property
    def _is_ready(self) -> bool:
        return self.fleet.is_ready and not self.tasks.failure

    @property
    def _health_status(self) -> int:
        return 200 if self._is_ready else 503

    async def _report(self, request: web.Request) -> web.Response:
        return reply(self.status())

    async def _metrics_page(self, request: web.Request) -> web.Response:
        """Reply with the gateway's and the engines' metrics, in Prometheus' text format."""
        found = {replica.label: page for replica, page in (await self.fleet.metrics_pages()).items()}
        queue_lengths = {model: self.scheduler.queue_length(model) for model in self.fleet.models.names}
        self.metrics.observe(self.fleet, queue_lengths)
        return web.Response(body=self.metrics.page(found), content_type="text/plain", charset="utf-8")

    async def _life(self, request: web.Request) -> web.Response:
        """Reply with the attempts of each rollout of a request: times, replicas, weight versions, ends."""
        name = request.match_info["request_id"]
        if not (found := self.scheduler.history.of(name)):
            raise UnknownRequest(
                f"no rollout of request {name!r} is among the last {KEPT:,}: send X-Request-Id to choose the id, or "
                "take it from the reply"
            )
        return reply({"request_id": name, "rollouts": found})
