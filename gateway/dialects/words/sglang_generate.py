"""POST /generate of SGLang's dialect, answered by engines of any kind through `Completions`."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engines.engine import Json
from engines.raw_json import decoded, opened
from gateway.dialects.completions import CompletionPrompt, Completions
from gateway.dialects.sample import Sample
from gateway.dialects.streams import Show
from gateway.dialects.words.sglang import Asked, aborted_reply, answer, read_asked
from gateway.fleet.fleet import Fleet

_SHORT_TOKENS = 128  # a sample as short as this is repeated with each chunk
_GROWTH = 1 / 32

Task = asyncio.Task[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A prompt of `client`. The reply is a list if it has several samples."""

    client: str
    asked: Asked
    prompt: CompletionPrompt

    @property
    def n(self) -> int:
        return self.prompt.rollout.n

    @property
    def model(self) -> str:
        return self.prompt.rollout.model


class SglangGenerate:
    """Translates SGLang's bodies for `Completions`."""

    def __init__(self, completions: Completions, fleet: Fleet) -> None:
        self._completions = completions
        self._fleet = fleet
        self._running: defaultdict[tuple[str, str], set[Task]] = defaultdict(set)  # by client and id

    def abort(self, client: str, rid: str) -> None:
        """Abort the client's requests of an id. Whole replies have no tokens then; streams keep theirs."""
        for task in self._running.get((client, rid), ()):
            task.cancel()

    def decode(self, body: Json, request_id: str, session: str = "", client: str = "") -> Generation:
        """Return what a body asks for. Raise `InvalidRequest` before any replica has work."""
        asked = read_asked(body, request_id)
        [prompt] = self._completions.decode(asked.body, asked.rid, session)
        return Generation(client=client, asked=asked, prompt=prompt)

    async def generate(self, given: Generation) -> tuple[Json | list[Json], Json]:
        """Return the reply and its usage."""
        began = time.monotonic()
        with self._begun(given, self._completions.generate([given.prompt])) as task:
            await asyncio.wait([task])
        reply = aborted_reply(given.n, self._fleet.version) if task.cancelled() else task.result()
        seconds, usage = time.monotonic() - began, reply.get("usage")
        answers = [answer(given.asked, choice, usage, seconds) for choice in reply["choices"]]
        return answers if given.n > 1 else answers[0], usage or {}

    @contextmanager
    def _begun(self, given: Generation, work: Coroutine[Any, Any, Any]) -> Iterator[Task]:
        """Have work run as a task, which an abort of the request's id cancels, and the end of the block."""
        task, name = asyncio.create_task(work), (given.client, given.asked.rid)
        self._running[name].add(task)
        try:
            yield task
        finally:
            task.cancel()
            self._running[name].discard(task)
            if not self._running[name]:
                del self._running[name]

    async def stream(self, given: Generation, usages: list[Json], show: Show) -> None:
        """Show chunks that repeat each sample from its start, as SGLang's do; `index` numbers several samples.

        A long sample is repeated when it has grown by 1/32: each token would else cost as much as all before it.
        """
        began, samples = time.monotonic(), [Sample(index) for index in range(given.n)]
        repeated = [0] * len(samples)

        def repeat(sample: Sample) -> None:
            repeated[sample.index] = sample.num_made
            reply = answer(given.asked, _joined(sample), None, time.monotonic() - began)
            show(reply | {"index": sample.index} if given.n > 1 else reply)

        def take(chunk: Json) -> None:
            for choice in chunk["choices"]:
                sample = samples[choice["index"]]
                sample.add_told(choice)
                is_long = sample.num_made > _SHORT_TOKENS
                if not (sample.is_open and is_long and sample.num_made < repeated[sample.index] * (1 + _GROWTH)):
                    repeat(sample)

        with self._begun(given, self._completions.stream([given.prompt], usages, take)) as task:
            await asyncio.wait([task])
        if not task.cancelled():
            task.result()
            return
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
