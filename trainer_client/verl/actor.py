"""`rollout.name=gateway`: a replica of verl's asynchronous trainers, whose server is a Ray actor before a gateway."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import ray
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput

from engines.errors import ConfigError
from engines.types import PauseMode
from trainer_client.blocking import BlockingRolloutClient
from trainer_client.verl.settings import ENGINE_KWARGS, Settings, check_gateway, read_settings
from trainer_client.verl.token_source import TokenSource

NAME = "gateway"
T = TypeVar("T")


class GatewayServer:
    """A Ray actor for verl: the server of its client, and the only worker of its weight syncs.

    It has no engine and no GPU. verl stops its servers for a sync; here the gateway handles rollouts in flight by
    `weights.in_flight`, unless `settings.abort_at_sync`. Only the first server pauses and resumes.
    """

    def __init__(self, settings: Settings, rollout: Any, is_first: bool) -> None:
        self._settings = settings
        self._pauses = settings.abort_at_sync and is_first
        self._rollout = rollout
        self._source = TokenSource(settings, rollout, max_model_len=0)
        self._syncing = 0

    async def start(self) -> None:
        """Wait for a complete fleet. Raises the errors of `check_gateway`."""
        length = await asyncio.to_thread(check_gateway, self._settings, self._rollout)
        self._source = TokenSource(self._settings, self._rollout, length)
        await self.resume_generation()  # a run that ended during a sync has left a pause

    async def close(self) -> None:
        """Drop the connections. verl ends a server with its actor."""
        await self._source.close()

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        **others: Any,
    ) -> TokenOutput:
        """Return one completion, or the part before an abort: verl's client asks for the rest.

        Raises the gateway's own error, and `DeadlineExceeded`.
        """
        output = await self._source.generate(request_id, prompt_ids, sampling_params, resumes=False, others=others)
        # verl's resuming client reads one step per part; the oldest is the safe choice.
        output.extra_fields["global_steps"] = output.extra_fields["min_global_steps"]
        return output

    async def update_weights(self, global_steps: int | None = None) -> None:
        """Record the start of verl's sync; the training workers send the weights to the gateway."""
        self._syncing = global_steps or 0

    async def execute_checkpoint_engine(self, method: str, **_: Any) -> dict[str, Any] | None:
        """Handle a stage of verl's sync. After the last, the served version is the synced step's."""
        if method == "finalize":
            self._source.version_of_step_0 = (
                await asyncio.to_thread(self._control, BlockingRolloutClient.weight_version) - self._syncing
            )
        return {} if method == "prepare" else None

    def _control(self, ask: Callable[[BlockingRolloutClient], T]) -> T:
        with BlockingRolloutClient(self._settings.url) as client:
            return ask(client)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        if self._pauses:
            await asyncio.to_thread(self._control, lambda client: client.pause(PauseMode.ABORT))

    async def resume_generation(self) -> None:
        if self._pauses:
            await asyncio.to_thread(self._control, BlockingRolloutClient.resume)

    async def start_profile(self, **_: Any) -> None:
        raise ConfigError("a gateway's engines are not profiled by verl: set global_profiler.steps=null")

    async def clear_kv_cache(self) -> None:
        """Do nothing: the gateway's engines keep their memory, and are not profiled."""

    release_kv_cache = resume_kv_cache = wake_up = sleep = stop_profile = clear_kv_cache


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
