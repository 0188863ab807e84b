"""Routes about the fleet: health, status, metrics."""

from collections.abc import Callable

from aiohttp import web

from engines.engine import Json
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.fleet.placement.scheduler import Scheduler
from gateway.http.access import Access
from gateway.http.json_body import reply
from gateway.http.supervisor import Supervisor
from gateway.http.workers.crew import Workers


class FleetRoutes:
    """Health, status and metrics of the fleet."""

    def __init__(
        self,
        fleet: Fleet,
        scheduler: Scheduler,
        metrics: Metrics,
        status: Callable[[], Json],
        tasks: Supervisor,
        workers: Workers,
    ) -> None:
        self._workers = workers
        self._tasks = tasks
        self._fleet = fleet
        self._scheduler = scheduler
        self._metrics = metrics
        self._status = status

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        health = access.for_inference_or(self._health_report, self._health)
        router.add_get("/health", health)
        router.add_get("/ping", health)
        router.add_get("/status", access.for_inference(self._report))
        router.add_get("/metrics", access.for_inference(self._metrics_page))

    async def _health(self, request: web.Request) -> web.Response:
        """Reply 200 once the fleet is complete, else 503, on which TRL waits. An ended background task gives 503."""
        return reply({"ready": self._is_ready}, self._health_status)

    async def _health_report(self, request: web.Request) -> web.Response:
        """Reply 200 once the fleet is complete, else 503; with a key the body is the status report."""
        return reply(self._status(), self._health_status)

    @property
    def _is_ready(self) -> bool:
        return self._fleet.is_ready and not self._tasks.failure

    @property
    def _health_status(self) -> int:
        return 200 if self._is_ready else 503

    async def _report(self, request: web.Request) -> web.Response:
        """Reply with replicas, weights, updates, queues and events."""
        return reply(self._status())

    async def _metrics_page(self, request: web.Request) -> web.Response:
        """Reply with the gateway's and the engines' metrics, in Prometheus' text format."""
        found = {replica.label: page for replica, page in (await self._fleet.metrics_pages()).items()}
        queue_lengths = {model: self._scheduler.queue_length(model) for model in self._fleet.models.names}
        self._metrics.observe(self._fleet, queue_lengths)
        return web.Response(
            body=self._metrics.page(found, self._workers.counts()), content_type="text/plain", charset="utf-8"
        )
