"""`RolloutClient` for a trainer without an event loop.

The asynchronous client runs on its own thread, so that generation goes on while the trainer computes.
"""

import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from trainer_client.batch import Batch
from trainer_client.client import Prompt, RolloutClient
from trainer_client.loop_thread import LoopThread
from trainer_client.pool import RolloutPool
from trainer_client.progress import Progress
from trainer_client.results import Completion, Rollout
from trainer_client.sampling import SamplingParams
from trainer_client.submission import Submission

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


def _blocking(
    call: Callable[Concatenate[RolloutClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["BlockingRolloutClient", P], T]:
    """Make a method that waits for `call` on the client's thread."""

    @functools.wraps(call)
    def waiting(self: "BlockingRolloutClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.wait(call(self._client, *args, **kwargs))

    return waiting


def _beginning(
    call: Callable[Concatenate[RolloutClient, P], T], wrapped: Callable[[T, "BlockingRolloutClient"], R]
) -> Callable[Concatenate["BlockingRolloutClient", P], R]:
    """Make a method that makes `call` on the client's thread, and returns its result `wrapped`, at once."""

    @functools.wraps(call)
    def beginning(self: "BlockingRolloutClient", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return wrapped(self._thread.run(lambda: call(self._client, *args, **kwargs)), self)

    return beginning


class BlockingRolloutClient:
    """`RolloutClient` with blocking calls; `on_progress` runs on the client's thread.

    Usable from several threads. `close`, or the end of a `with` block, cancels running calls.
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
        self._thread = LoopThread("rollout client")

    def close(self) -> None:
        """Cancel running calls and drop the connections. May be called twice."""
        self._thread.close(self._client.close)

    def __enter__(self) -> "BlockingRolloutClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    generate = _beginning(RolloutClient.generate, lambda batch, client: BlockingBatch(batch, client))
    submit = _beginning(RolloutClient.submit, lambda submission, client: BlockingSubmission(submission, client))
    wait_ready = _blocking(RolloutClient.wait_ready)
    status = _blocking(RolloutClient.status)
    models = _blocking(RolloutClient.models)
    server_info = _blocking(RolloutClient.server_info)
    weight_version = _blocking(RolloutClient.weight_version)
    world_size = _blocking(RolloutClient.world_size)
    init_weight_transfer = _blocking(RolloutClient.init_weight_transfer)
    start_weight_update = _blocking(RolloutClient.start_weight_update)
    update_weights = _blocking(RolloutClient.update_weights)
    finish_weight_update = _blocking(RolloutClient.finish_weight_update)
    abandon_weight_update = _blocking(RolloutClient.abandon_weight_update)
    served_weights = _blocking(RolloutClient.served_weights)
    weight_store = _blocking(RolloutClient.weight_store)
    load_weights = _blocking(RolloutClient.load_weights)
    canary_token_ids = _blocking(RolloutClient.canary_token_ids)
    pause = _blocking(RolloutClient.pause)
    resume = _blocking(RolloutClient.resume)

    @contextmanager
    def weight_lease(self) -> Iterator[str]:
        """As `RolloutClient.weight_lease`."""
        lease = self._client.weight_lease()
        name = self._thread.wait(lease.__aenter__())
        try:
            yield name
        finally:
            if not self._thread.is_over:
                self._thread.wait(lease.__aexit__(None, None, None))

    def _each(self, source: AsyncGenerator[T]) -> Generator[T]:
        """Yield the items of `source`, whose loop closes it once this has let go of it.

        Nothing waits for that: the garbage collector may end an iteration in any call of any thread.
        """

        async def following() -> T | None:
            return await anext(source, None)

        while (item := self._thread.wait(following())) is not None:
            yield item


class BlockingSubmission:
    """The completions of one call of `submit`, as `Submission`."""

    def __init__(self, submission: Submission, client: BlockingRolloutClient) -> None:
        self._submission = submission
        self._client = client
        self.id = submission.id
        self.outcomes, self.failures = submission.outcomes, submission.failures

    def __iter__(self) -> Generator[Completion]:
        return self._client._each(aiter(self._submission))

    def cancel(self, groups: list[int] | None = None) -> None:
        """End groups that run; all unless named."""
        self._client._thread.wait(self._submission.cancel(groups))


class BlockingRolloutPool:
    """`RolloutPool` with blocking calls. `prompts` are read on the client's thread."""

    def __init__(
        self,
        client: BlockingRolloutClient,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | None = None,
        *,
        size: int,
        need: int | None = None,
        max_staleness: int | None = None,
        timeout_s: float = 3600.0,
    ) -> None:
        self._client = client
        self._pool = RolloutPool(
            client._client, prompts, sampling, size=size, need=need, max_staleness=max_staleness, timeout_s=timeout_s
        )

    def __enter__(self) -> "BlockingRolloutPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def batch(self, num_groups: int) -> list[Rollout]:
        """Return the first groups to end, as `RolloutPool.batch`."""
        return self._client._thread.wait(self._pool.batch(num_groups))

    def close(self) -> None:
        """Cancel a batch that another thread waits for, and free what the gateway keeps of suspended groups."""
        self._client._thread.wait(self._pool.close())


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
        """Yield rollouts as they end."""
        return self._client._each(self._batch.rollouts())

    def gather(self) -> list[Rollout]:
        """Return all rollouts, in the order of their prompts."""
        return self._client._thread.wait(self._batch.gather())

    def cancel(self, prompt_index: int | None = None) -> None:
        """Cancel one prompt, or all."""
        self._client._thread.run(lambda: self._batch.cancel(prompt_index))
