"""`RolloutClient` for a trainer without an event loop. The one implementation runs on a thread of its own, so that
generation goes on while the trainer computes."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from typing import Any, TypeVar

from engines.types import InFlight, PauseMode
from trainer_client.batch import Batch, Failures
from trainer_client.client import Prompt, RolloutClient
from trainer_client.http import Json
from trainer_client.progress import OnProgress, Progress
from trainer_client.push_options import PushOptions
from trainer_client.results import Completion, Rollout
from trainer_client.sampling import SamplingParams
from trainer_client.served import ServedWeights

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 10.0


class BlockingRolloutClient:
    """Takes what `RolloutClient` takes, and does what it does, with calls that return when it is done.

    May be used from several threads. `close` it, or use it as a context manager: what runs is cancelled then.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        model: str | None = None,
        max_in_flight: int = 512,
        attempts: int = 5,
        outage_s: float = 180.0,
    ) -> None:
        self._client = RolloutClient(
            url, api_key=api_key, model=model, max_in_flight=max_in_flight, attempts=attempts, outage_s=outage_s
        )
        self.url = self._client.url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout client", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancel what runs and drop the connections. May be called twice."""
        if self._loop.is_closed():
            return
        try:
            self._wait(asyncio.wait_for(self._client.close(), _CLOSE_TIMEOUT_S))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_TIMEOUT_S)
            self._loop.close()

    def __enter__(self) -> "BlockingRolloutClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        min_version: int | None = None,
        max_staleness: int | None = None,
        sessions: Sequence[str] | None = None,
        timeout_s: float = 3600.0,
        failures: Failures = "raise",
        on_progress: OnProgress | None = None,
    ) -> "BlockingBatch":
        """Begin, and return at once; see `RolloutClient.generate`. `on_progress` is called on the client's thread."""

        async def begin() -> Batch:
            return self._client.generate(
                prompts,
                sampling,
                min_version=min_version,
                max_staleness=max_staleness,
                sessions=sessions,
                timeout_s=timeout_s,
                failures=failures,
                on_progress=on_progress,
            )

        return BlockingBatch(self._wait(begin()), self)

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        self._wait(self._client.wait_ready(timeout_s))

    def status(self) -> Json:
        return self._wait(self._client.status())

    def models(self) -> list[Json]:
        return self._wait(self._client.models())

    def server_info(self) -> Json:
        return self._wait(self._client.server_info())

    def weight_version(self) -> int:
        return self._wait(self._client.weight_version())

    def world_size(self, timeout_s: float) -> int:
        return self._wait(self._client.world_size(timeout_s))

    def init_weight_transfer(self, init_info: Json, timeout_s: float) -> None:
        self._wait(self._client.init_weight_transfer(init_info, timeout_s))

    def start_weight_update(self, timeout_s: float, *, in_flight: InFlight | None = None) -> None:
        self._wait(self._client.start_weight_update(timeout_s, in_flight=in_flight))

    def update_weights(self, update_info: Json, timeout_s: float) -> None:
        self._wait(self._client.update_weights(update_info, timeout_s))

    def finish_weight_update(self, canary_logprobs: Sequence[float] | None, timeout_s: float) -> int:
        return self._wait(self._client.finish_weight_update(canary_logprobs, timeout_s))

    def served_weights(self) -> ServedWeights:
        return self._wait(self._client.served_weights())

    def weight_store(self) -> Json:
        return self._wait(self._client.weight_store())

    def load_weights(self, snapshot: str, options: PushOptions, timeout_s: float) -> int:
        return self._wait(self._client.load_weights(snapshot, options, timeout_s))

    def abandon_weight_update(self, reason: str) -> None:
        self._wait(self._client.abandon_weight_update(reason))

    def canary_token_ids(self) -> list[int]:
        return self._wait(self._client.canary_token_ids())

    def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        self._wait(self._client.pause(mode))

    def resume(self) -> None:
        self._wait(self._client.resume())

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result, from the client's thread. Whoever interrupts the wait cancels it there."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _each(self, source: AsyncGenerator[T]) -> Generator[T]:
        async def following() -> T | None:
            return await anext(source, None)

        async def close() -> None:
            await source.aclose()

        try:
            while (item := self._wait(following())) is not None:
                yield item
        finally:
            if not self._loop.is_closed():
                self._wait(close())


class BlockingBatch:
    """The rollouts of one call of `generate`, as `Batch`."""

    def __init__(self, batch: Batch, client: BlockingRolloutClient) -> None:
        self._batch = batch
        self._client = client
        self.request_id = batch.request_id
        self.num_prompts = batch.num_prompts

    @property
    def is_done(self) -> bool:
        return self._batch.is_done

    @property
    def progress(self) -> Progress:
        return self._batch.progress

    def __iter__(self) -> Generator[Completion]:
        return self._client._each(aiter(self._batch))

    def rollouts(self) -> Generator[Rollout]:
        """Rollouts as they end."""
        return self._client._each(self._batch.rollouts())

    def gather(self) -> list[Rollout]:
        """All rollouts, in the order of their prompts."""
        return self._client._wait(self._batch.gather())

    def cancel(self, prompt_index: int | None = None) -> None:
        """Call off what still runs: of one prompt, or of all."""

        async def call_off() -> None:
            self._batch.cancel(prompt_index)

        self._client._wait(call_off())
