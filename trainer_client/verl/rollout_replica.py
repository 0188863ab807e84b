"""`rollout.name=gateway`: a rollout replica for verl's asynchronous trainers, with a gateway as server."""

import ray
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry

from engines.errors import ConfigError
from trainer_client.verl.actor import GatewayServer
from trainer_client.verl.settings import ENGINE_KWARGS, read_settings

NAME = "gateway"


class GatewayReplica(RolloutReplica):
    """A connection to the gateway: an actor without a GPU. Several share the load of requests."""

    async def init_standalone(self) -> None:
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Start the actor. Raises `ConfigError` for engines on training GPUs, and the errors of
        `GatewayServer.start`."""
        if self.rollout_mode is not RolloutMode.STANDALONE:
            raise ConfigError(
                "rollout.name=gateway has no engines on training GPUs: set actor_rollout_ref.hybrid_engine=False "
                "with trainer.v1.trainer_mode=separate_async, or use trainer.v1.trainer_mode=gateway"
            )
        backend = self.config.checkpoint_engine.backend
        if backend != NAME:
            raise ConfigError(
                f"rollout.checkpoint_engine.backend={backend} does not send weights to a gateway: set it to {NAME}"
            )
        settings = read_settings(self.config.checkpoint_engine.engine_kwargs.get(NAME) or {}, ENGINE_KWARGS)
        actor = ray.remote(GatewayServer).options(num_cpus=0, max_concurrency=self.max_concurrency)
        server = actor.remote(settings, self.config, is_first=self.replica_rank == 0)
        await server.start.remote()
        self.servers = self.workers = [server]
        self._server_handle = server
        self._server_address = f"{settings.url}#{self.replica_rank}"  # verl's balancer identifies servers by it


RolloutReplicaRegistry.register(NAME, lambda: GatewayReplica)
