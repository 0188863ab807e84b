"""POST /generate of SGLang's dialect, answered by engines of any kind through `Completions`."""

import asyncio
import time
from dataclasses import dataclass

from engines.engine import Json
from engines.raw_json import decoded, opened
from gateway.dialects.completion_prompt import CompletionPrompt
from gateway.dialects.completions import Completions, longest_first
from gateway.dialects.sample import Sample
from gateway.dialects.streams import Show, Usage
from gateway.dialects.words.sglang import Asked, aborted_reply, answer, asked_prompts
from gateway.fleet.fleet import Fleet

_SHORT_TOKENS = 128  # a sample as short as this is repeated with each chunk
_GROWTH = 1 / 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The prompts of one body of `client`. The reply is a list if the prompts came as a list or have several
    samples."""

    client: str
    asked: list[Asked]
    prompts: list[CompletionPrompt]
    is_batch: bool

    @property
    def n(self) -> int:
        return self.prompts[0].rollout.n

    @property
    def model(self) -> str:
        return self.prompts[0].rollout.model

    @property
    def is_list(self) -> bool:
        return self.is_batch or self.n > 1


class SglangGenerate:
    """Translates SGLang's bodies for `Completions`, each prompt with its own sampling parameters."""

    def __init__(self, completions: Completions, fleet: Fleet) -> None:
        self._completions = completions
        self._fleet = fleet
        self._running: dict[asyncio.Task[Json], tuple[str, str]] = {}  # clients and their ids
        self._streams: dict[asyncio.Task[None], Batch] = {}

    def abort(self, client: str, rid: str) -> None:
        """Abort the client's prompts of an id. Whole replies have no tokens then; streams keep theirs.

        A stream of several prompts ends with the first of them.
        """
        for task, running in list(self._running.items()):
            if running == (client, rid):
                task.cancel()
        for stream, batch in list(self._streams.items()):
            if batch.client == client and any(asked.rid == rid for asked in batch.asked):
                stream.cancel()

    def decode(self, body: Json, request_id: str, session: str = "", client: str = "") -> Batch:
        """Return the batch of a body. Raise `InvalidRequest` before any replica has work."""
        asked, is_batch = asked_prompts(body, request_id)
        session = "" if is_batch else session
        prompts = [
            self._completions.decode(prompt.body, prompt.rid, session, first=index)[0]
            for index, prompt in enumerate(asked)
        ]
        return Batch(client=client, asked=asked, prompts=prompts, is_batch=is_batch)

    async def generate(self, batch: Batch) -> tuple[Json | list[Json], Json]:
        """Return the reply and its usage. The first prompt that an engine refuses ends the others, as in SGLang."""
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                turns = longest_first(batch.prompts)
                begun = {prompt.index: self._begun(group, batch, prompt) for prompt in turns}
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        seconds, usage, answers = time.monotonic() - began, Usage(), []
        for index, asked in enumerate(batch.asked):
            task = begun[index]
            reply = aborted_reply(batch.n, self._fleet.version) if task.cancelled() else task.result()
            usage.add_chunk(index, reply.get("usage"))
            answers += [answer(asked, choice, reply.get("usage"), seconds) for choice in reply["choices"]]
        return answers if batch.is_list else answers[0], usage.total()

    def _begun(self, group: asyncio.TaskGroup, batch: Batch, prompt: CompletionPrompt) -> "asyncio.Task[Json]":
        task = group.create_task(self._completions.generate([prompt]))
        self._running[task] = batch.client, batch.asked[prompt.index].rid
        task.add_done_callback(self._running.pop)
        return task

    async def stream(self, batch: Batch, usage: Usage, show: Show) -> None:
        """Show chunks that repeat each sample from its start, as SGLang's do; `index` numbers several samples.

        A long sample is repeated when it has grown by 1/32: each token would else cost as much as all before it.
        """
        began, samples = time.monotonic(), [Sample(index) for index in range(len(batch.prompts) * batch.n)]
        repeated = [0] * len(samples)

        def repeat(sample: Sample) -> None:
            repeated[sample.index], asked = sample.num_made, batch.asked[sample.index // batch.n]
            reply = answer(asked, _joined(sample), None, time.monotonic() - began)
            show(reply | {"index": sample.index} if batch.is_list else reply)

        def take(chunk: Json) -> None:
            for choice in chunk["choices"]:
                sample = samples[choice["index"]]
                sample.add_told(choice)
                is_long = sample.num_made > _SHORT_TOKENS
                if not (sample.is_open and is_long and sample.num_made < repeated[sample.index] * (1 + _GROWTH)):
                    repeat(sample)

        task = asyncio.ensure_future(self._completions.stream(batch.prompts, usage, take))
        self._streams[task] = batch
        try:
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
                return
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del self._streams[task]
        for sample in samples:
            if sample.is_open:
                sample.end("abort", self._fleet.version)
                repeat(sample)


def _joined(sample: Sample) -> Json:
    """The choice with all that it has so far."""
    whole = sample.whole
    joined = {"text": whole.text or "", "token_ids": sample.token_ids, "logprobs": whole.scores}
    told: Json = opened(sample.last | joined | {"prompt_token_ids": sample.prompt and decoded(sample.prompt)})
    return told
