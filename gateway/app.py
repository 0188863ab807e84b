"""The Serve application: engine groups, the gateway in front of them, and the control plane. `serve deploy` calls
`build` with the configuration as its arguments."""

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import ray
import structlog
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle

from engines.config import EngineConfig
from engines.engine import Json
from engines.errors import ConfigError
from engines.process.launch import gpus_to_reserve
from engines.process.log_lines import write_log_lines
from engines.process.process import longest_stop_s
from engines.serve_replica import EngineReplica
from engines.types import EngineStart, ReplicaInfo
from gateway.config.autoscaling import sizing
from gateway.config.load import key_variables, with_secrets
from gateway.config.placement import Nodes, Resource, check_placement, cpus_to_reserve, lacking, needed
from gateway.config.schema import Config
from gateway.control import Control
from gateway.http.listener import Listener
from gateway.http.server import GatewayServer

log = structlog.get_logger()

# Time over the drain and the stop of an engine until Serve kills a replica that does not end.
_SHUTDOWN_SLACK_S = 10.0
_ASK_TIMEOUT_S = 5.0
# Ray's resource of the head node.
_HEAD = "node:__internal_head__"
# Longest delay until Ray frees the GPUs of processes that have just ended.
_FREE_WITHIN_S = 15.0


def build(args: Config) -> serve.Application:
    """The application as Serve's typed builder: `import_path: gateway.app:build`, `args:` the configuration.

    Raises `ConfigError` for engines that cannot come up: Serve would wait for GPUs and CPUs without end.
    """
    config = with_secrets(args)
    if not config.serve.nodes_may_join:
        check_placement(config.groups, _nodes("CPU"), "CPU")
        if needed(config.groups):
            _check_gpus(config)
    engines = {name: _engine_group(name, group, key_variables(args)) for name, group in config.groups.items()}
    gateway = serve.deployment(
        name="gateway",
        max_ongoing_requests=1000,
        # Its URL and its store stay on one node when it restarts.
        ray_actor_options={"num_cpus": 0, "resources": {_HEAD: 0.001}},
    )(Gateway)
    control = serve.deployment(name="control", max_ongoing_requests=100, ray_actor_options={"num_cpus": 0})(Control)
    return control.bind(gateway.bind(config, engines))


def _check_gpus(config: Config) -> None:
    check_placement(config.groups, _nodes("GPU"))
    before = serve.status().applications.get(config.name)
    if before and any(deployment.replica_states for deployment in before.deployments.values()):
        return  # it holds GPUs of its own, which it gives up one by one
    deadline = time.monotonic() + _FREE_WITHIN_S
    while problem := lacking(
        config.groups, sum(gpus for _, gpus in _nodes("GPU")), ray.available_resources().get("GPU", 0.0)
    ):
        if time.monotonic() > deadline:
            raise ConfigError(problem)
        time.sleep(1.0)


def _nodes(resource: Resource) -> Nodes:
    alive = (node for node in ray.nodes() if node["Alive"])
    return [(node["NodeManagerAddress"], node["Resources"].get(resource, 0.0)) for node in alive]


def _engine_group(name: str, config: EngineConfig, hidden: Sequence[str]) -> serve.Application:
    return serve.deployment(
        name=name,
        **sizing(config),
        ray_actor_options={"num_cpus": cpus_to_reserve(config), "num_gpus": gpus_to_reserve(config)},
        # The replica itself retries a failed start where that may help. Once a replica of the group has come up, Serve
        # restarts it without limit, whatever this says.
        max_constructor_retry_count=1,
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=config.drain_timeout_s + longest_stop_s(config.stop_timeout_s) + _SHUTDOWN_SLACK_S,
        max_ongoing_requests=100,
    )(EngineReplica).bind(config, name, hidden)


class Gateway:
    """Hosts the listener. Serve restarts it here; requests never pass through Serve."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, engines: dict[str, DeploymentHandle]
    ) -> None:
        write_log_lines(sys.stdout)  # Serve's log of the replica
        self._engines = engines
        self._known: list[ReplicaInfo] = []
        self._node = ray.get_runtime_context().get_node_id()
        self._serve_loop = asyncio.get_running_loop()
        self._listener = Listener(config, self._discover)
        await asyncio.to_thread(self._listener.start)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve calls this when `up` has changed how many replicas there are to be."""
        await self._listener.ask(lambda server: server.fleet.expect(user_config.get("num_replicas") or {}))

    async def drain(self, replica_id: str) -> int:
        """Stop placing on a replica that Serve is removing; return its samples in flight."""
        return await self._listener.ask(lambda server: server.fleet.drain(replica_id))

    async def samples(self, group: str) -> int:
        """Return the samples of a group's model that are in flight or wait for a replica."""
        return await self._listener.ask(lambda server: server.scheduler.samples(group))

    async def tell(self, start: EngineStart) -> None:
        """Note how far a start has come of an engine that cannot be asked yet, or that it can be."""
        await self._listener.ask(lambda server: server.fleet.told(start))

    def url(self) -> str:
        return self._listener.url

    async def status(self) -> Json:
        return await self._listener.ask(GatewayServer.status)

    def check_health(self) -> None:
        if not self._listener.is_alive:
            raise RuntimeError("the gateway's thread has ended")

    async def __del__(self) -> None:
        if hasattr(self, "_listener"):
            await asyncio.to_thread(self._listener.stop)

    async def _discover(self) -> list[ReplicaInfo]:
        """Run on the listener's loop; Serve's handles belong to Serve's loop."""
        listed = asyncio.run_coroutine_threadsafe(self._list_replicas(), self._serve_loop)
        return await asyncio.wrap_future(listed)

    async def _list_replicas(self) -> list[ReplicaInfo]:
        """List running replicas. A broadcast skips dead ones silently, so an absent replica is gone."""
        if set(await self._ask_all("incarnation")) != {info.incarnation for info in self._known}:
            self._known = await self._ask_all("describe", self._node)
        return self._known

    async def _ask_all(self, method: str, *arguments: str) -> list[Any]:
        answers = await asyncio.gather(
            *(
                handle.broadcast(method, *arguments).results_async(timeout_s=_ASK_TIMEOUT_S, return_exceptions=True)
                for handle in self._engines.values()
            )
        )
        replies = [reply for group in answers for reply in group]
        for answer in replies:
            if isinstance(answer, RayTaskError):  # other errors mean a replica that is gone
                log.error("a replica could not answer", call=method, error=str(answer))
        return [answer for answer in replies if not isinstance(answer, BaseException)]
