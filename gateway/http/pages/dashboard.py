"""The dashboard: one static page, and the JSON that it draws."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from importlib.resources import files

from aiohttp import web

from engines.engine import Json
from gateway.fleet.concurrency import is_set_within
from gateway.fleet.fleet import Fleet
from gateway.fleet.history import Timeline
from gateway.fleet.metrics import Metrics, package_version
from gateway.fleet.placement.scheduler import Scheduler
from gateway.fleet.watch.engine_page import EngineLoad, read_load
from gateway.http.access import Access
from gateway.http.json_body import reply
from gateway.weights.coordinator import WeightCoordinator

# Seconds between two looks while somebody watches, and otherwise: an engine's page costs it some milliseconds.
_WATCHED_S = 1.0
_UNWATCHED_S = 10.0
_WATCHED_FOR_S = 30.0
_FRESH_S = 2.0
# A page may be older than its arrival, so two looks close together would show any rate.
_RATED_OVER_S = 0.5
_KEPT = 600
_UPDATES = 20
# The page loads nothing from elsewhere, and no other site may frame it.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Dashboard:
    """The fleet as a page: states, versions, load, updates and events."""

    def __init__(
        self,
        fleet: Fleet,
        scheduler: Scheduler,
        weights: WeightCoordinator,
        metrics: Metrics,
        status: Callable[[], Json],
    ) -> None:
        """`status` makes the status report."""
        self._fleet = fleet
        self._scheduler = scheduler
        self._weights = weights
        self._metrics = metrics
        self._status = status
        self._timeline = Timeline(fleet)
        self._page = files(__package__).joinpath("dashboard.html").read_bytes()
        self._began = time.time()
        self._watched_at = -_WATCHED_FOR_S
        self._watched = asyncio.Event()
        self._looking = asyncio.Lock()
        self._loads: dict[str, EngineLoad] = {}
        self._rates: dict[str, float] = {}
        self._generated: dict[str, float] = {}
        self._rated_at = self._looked_at = -_WATCHED_FOR_S
        self._samples: deque[tuple[float, float, int, int]] = deque(maxlen=_KEPT)
        self._batch: Json | None = None
        self._placed_before = 0

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        """The page holds no data, so it is open; its JSON needs a key where `/status` does."""
        router.add_get("/dashboard", self._show)
        router.add_get("/dashboard.json", access.for_inference(self._data))

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            if time.monotonic() - self._watched_at < _WATCHED_FOR_S:
                await asyncio.sleep(_WATCHED_S)
                continue
            self._watched.clear()
            await is_set_within(self._watched, _UNWATCHED_S)

    async def look(self) -> None:
        """Take one sample of all engines and of the gateway."""
        async with self._looking:
            pages = await self._fleet.metrics_pages()
            self._sample({replica.replica_id: read_load(page) for replica, page in pages.items()})

    def _sample(self, found: dict[str, EngineLoad]) -> None:
        now, clock = time.time(), time.monotonic()
        if (elapsed := clock - self._rated_at) >= _RATED_OVER_S:
            self._rates = {
                replica_id: max(0.0, load.generated - self._generated[replica_id]) / elapsed
                for replica_id, load in found.items()
                if replica_id in self._generated
            }
            self._generated = {replica_id: load.generated for replica_id, load in found.items()}
            self._rated_at = clock
        self._loads, self._looked_at = found, clock
        in_flight = sum(replica.load_samples for replica in self._fleet.replicas)
        self._samples.append((now, sum(self._rates.values()), in_flight, self._queue()))
        self._follow_batch(now, in_flight)

    def report(self) -> Json:
        at, rates, in_flight, queue = zip(*self._samples, strict=True) if self._samples else ((), (), (), ())
        return {
            "at": time.time(),
            "uptime_s": time.time() - self._began,
            "version": package_version(),
            "status": self._status(),
            "engines": {
                replica_id: {
                    "kv_usage": load.kv_usage,
                    "running": load.running,
                    "waiting": load.waiting,
                    "tokens_per_s": self._rates.get(replica_id),
                }
                for replica_id, load in self._loads.items()
            },
            "series": {"at": at, "tokens_per_s": rates, "in_flight": in_flight, "queue": queue},
            "timeline": self._timeline.report(),
            "lengths": self._lengths(),
            "staleness": self._staleness(),
            "updates": self._weights.updates.reports(_UPDATES),
            "batch": self._batch,
        }

    def _queue(self) -> int:
        return sum(self._scheduler.queue_length(model) for model in self._fleet.models.names)

    def _follow_batch(self, now: float, in_flight: int) -> None:
        """A batch begins when the first rollout comes to an idle fleet, and ends when none is left."""
        placed, queue = sum(replica.placed for replica in self._fleet.replicas), self._queue()
        if in_flight + queue == 0:
            self._batch, self._placed_before = None, placed
            return
        if self._batch is None:
            self._batch = {"began": now}
        done = max(0, placed - self._placed_before - in_flight)
        self._batch |= {"age_s": now - self._batch["began"], "done": done, "in_flight": in_flight, "queue": queue}

    def _lengths(self) -> list[list[float | None]]:
        """Finished requests by the upper edge of their number of tokens; no edge for the last."""
        counts = Counter[float]()
        for load in self._loads.values():
            counts.update(load.lengths)
        return [[None if edge == float("inf") else edge, counts[edge]] for edge in sorted(counts)]

    def _staleness(self) -> list[list[int | None]]:
        """Samples in flight by the versions that their replica is behind the target; null where it is unknown."""
        counts = Counter[int | None]()
        for replica in self._fleet.trained:
            version = replica.weight_version
            behind = None if version is None else self._fleet.target_version - version
            counts[behind] += replica.load_samples
        return [[behind, counts[behind]] for behind in sorted(counts, key=lambda behind: (behind is None, behind))]

    async def _show(self, request: web.Request) -> web.Response:
        """Reply with the page that draws /dashboard.json."""
        return web.Response(body=self._page, content_type="text/html", charset="utf-8", headers=_HEADERS)

    async def _data(self, request: web.Request) -> web.Response:
        """Reply with status, load, updates and events for the dashboard."""
        self._watched_at = time.monotonic()
        self._watched.set()
        if time.monotonic() - self._looked_at > _FRESH_S:
            await self.look()  # the first to watch sees the fleet as it is now
        return reply(self.report())
