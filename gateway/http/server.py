"""The aiohttp application behind the rollout URL: builds the parts, adds their routes, runs the background tasks."""

from collections.abc import AsyncGenerator
from pathlib import Path

from aiohttp import web

from engines.engine import Json
from engines.model_folder import model_folder
from gateway.agents.sessions import Sessions
from gateway.agents.tails import Tails
from gateway.agents.turns import Turns
from gateway.config.schema import Config
from gateway.dialects.chat import Chat
from gateway.dialects.completions import Completions
from gateway.dialects.rendering import Rendering
from gateway.dialects.replays import Replays
from gateway.dialects.runner import Runner
from gateway.dialects.token_generation import TokenGeneration
from gateway.fleet.adapter_loading import AdapterCoordinator
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Deliveries, Metrics
from gateway.fleet.placement.any_replica import AnyReplica
from gateway.fleet.placement.scheduler import Scheduler
from gateway.http.access import Access, Routes
from gateway.http.middleware import Measurement, note_begin
from gateway.http.pages.dashboard import Dashboard
from gateway.http.routes.agents import AgentRoutes
from gateway.http.routes.fleet import FleetRoutes
from gateway.http.routes.models import ModelRoutes
from gateway.http.routes.rollouts import RolloutRoutes
from gateway.http.routes.sessions import SessionRoutes
from gateway.http.routes.weights import WeightRoutes
from gateway.http.status import status_report
from gateway.http.supervisor import Supervisor
from gateway.ledger.ledger import Ledger, default_folder
from gateway.weights.coordinator import WeightCoordinator
from gateway.weights.snapshots import Snapshots


class GatewayServer:
    """The application in front of one fleet. Owns the tasks that watch the fleet, its weights and its adapters."""

    def __init__(self, config: Config, fleet: Fleet, metrics: Metrics) -> None:
        self._config = config
        self.fleet = fleet
        self.scheduler = scheduler = Scheduler(config.gateway, fleet, metrics)
        self._snapshots = Snapshots(config.weights, config.name, lambda: _checkpoint(config))
        self._weights = weights = WeightCoordinator(config.weights, fleet, scheduler, metrics, self._snapshots)
        self._adapters = AdapterCoordinator(config.weights, fleet)
        self._measurement = Measurement(metrics)
        self._access = Access(config.gateway)
        self._tasks = Supervisor()
        runner = Runner(config.gateway, scheduler, fleet, metrics)
        completions = Completions(fleet, runner)
        tokens = TokenGeneration(fleet, runner)
        any_replica = AnyReplica(fleet)
        rendering = Rendering(fleet, any_replica, config.gateway.queue_timeout_s)
        chat = Chat(fleet, runner, tokens, rendering)
        deliveries = Deliveries(fleet, metrics)
        self._ledger = Ledger(_ledger_folder(config))
        self._replays = Replays(config.gateway, completions, fleet, metrics, self._ledger)
        self._sessions = Sessions(config.gateway.sessions, self._ledger, metrics)
        agents = AgentRoutes(Turns(rendering, tokens, chat, deliveries, self._sessions, Tails(rendering)))
        models = ModelRoutes(config.fleet, fleet, weights, any_replica, self._adapters)
        self._dashboard = dashboard = Dashboard(fleet, scheduler, weights, metrics, self.status)
        self._routes: list[Routes] = [
            FleetRoutes(fleet, scheduler, metrics, self.status, self._tasks),
            models,
            RolloutRoutes(completions, chat, tokens, deliveries, self._replays, agents),
            agents,
            SessionRoutes(self._sessions),
            WeightRoutes(config.weights, fleet, weights, self._snapshots),
            dashboard,
        ]

    def application(self) -> web.Application:
        """The application for clients."""
        app = web.Application(
            client_max_size=self._config.gateway.max_body_bytes, middlewares=[self._measurement.measure]
        )
        app.on_response_prepare.append(note_begin)
        for routes in self._routes:
            routes.add_routes(app.router, self._access)
        app.cleanup_ctx.append(self._watching)
        app.on_shutdown.append(self._end_turns)
        return app

    @property
    def failure(self) -> str:
        """The end of a background task that should run on; "" while all run."""
        return self._tasks.failure

    def status(self) -> Json:
        """The status report."""
        report = status_report(self.fleet, self.scheduler, self._weights, self._snapshots)
        return report | {"ledger": self._ledger.report() | self._replays.report() | self._sessions.report()}

    async def _end_turns(self, app: web.Application) -> None:
        """End turns of sessions before the connections of their clients, who have not left."""
        await self._sessions.close()

    async def _watching(self, app: web.Application) -> AsyncGenerator[None]:
        await self._snapshots.open()
        self.fleet.events.add("gateway", "started")
        await self.fleet.look()
        await self._weights.restore()
        self._tasks.start("watch fleet", self.fleet.run())
        self._tasks.start("watch update", self._weights.run())
        self._tasks.start("watch adapters", self._adapters.run())
        self._tasks.start("watch load", self._dashboard.run())
        await self._ledger.open()
        if self._ledger.is_on:
            self._tasks.start("watch ledger", self._ledger.run())
        self._tasks.start("watch sessions", self._sessions.run())
        yield
        await self._replays.close()
        await self._ledger.close()
        await self._tasks.stop()
        await self._snapshots.close()  # last: a file system that hangs takes its time


def _ledger_folder(config: Config) -> Path | None:
    place = config.gateway.ledger
    if place is None:
        return None
    return default_folder(config.name) if place == "auto" else Path(place)


def _checkpoint(config: Config) -> Path | None:
    """The checkpoint of the policy, if this machine has it."""
    ours = (group for group in config.groups.values() if not group.frozen)
    return next(filter(None, map(model_folder, ours)), None)
