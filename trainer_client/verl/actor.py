"""What verl's own asynchronous trainers take for one of their rollout servers: an actor that asks a gateway."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from verl.workers.rollout.replica import TokenOutput

from engines.errors import ConfigError
from engines.types import PauseMode
from trainer_client.blocking import BlockingRolloutClient
from trainer_client.verl.settings import Settings, check_gateway
from trainer_client.verl.token_source import TokenSource

T = TypeVar("T")


class GatewayServer:
    """A Ray actor of verl's: the server that its client asks, and the one worker that its weight syncs meet.

    It has no engine and no GPU. verl stops its servers for a sync; here the gateway does what is to be done, at the
    moment of the update and as its `weights.in_flight` says, unless `settings.abort_at_sync`. The first of the servers
    speaks for all.
    """

    def __init__(self, settings: Settings, rollout: Any, is_first: bool) -> None:
        self._settings = settings
        self._pauses = settings.abort_at_sync and is_first
        self._rollout = rollout
        self._source = TokenSource(settings, rollout, max_model_len=0)
        self._syncing = 0

    async def start(self) -> None:
        """Wait for a complete fleet. Raises what `check_gateway` does."""
        length = await asyncio.to_thread(check_gateway, self._settings, self._rollout)
        self._source = TokenSource(self._settings, self._rollout, length)
        await self.resume_generation()  # a run that ended in the middle of a sync has left a pause

    async def close(self) -> None:
        """Drop the connections. verl's servers end with their actors."""
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
        # verl's client that goes on after aborts reads this one step of a part: the oldest never flatters.
        output.extra_fields["global_steps"] = output.extra_fields["min_global_steps"]
        return output

    async def update_weights(self, global_steps: int | None = None) -> None:
        """verl's sync has begun; the training workers bring these weights to the gateway."""
        self._syncing = global_steps or 0

    async def execute_checkpoint_engine(self, method: str, **_: Any) -> dict[str, Any] | None:
        """verl's steps of a sync. After the last one the served version is that of the step that was synced."""
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
