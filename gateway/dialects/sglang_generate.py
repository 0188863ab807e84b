"""POST /generate of SGLang's dialect, answered by engines of any kind through `Completions`."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from engines.engine import Json
from gateway.dialects.completion_prompt import CompletionPrompt
from gateway.dialects.completions import Completions, longest_first
from gateway.dialects.parallel import Show
from gateway.dialects.raw_json import opened
from gateway.dialects.usage import Usage
from gateway.dialects.words.sglang import Asked, aborted_reply, answer, asked_prompts
from gateway.fleet.fleet import Fleet

_SHORT_TOKENS = 128  # a sample as short as this is repeated with each chunk
_GROWTH = 1 / 32
_LOGPROBS = ("token_logprobs", "top_logprobs")


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
        began, samples = time.monotonic(), [_Sample() for _ in range(len(batch.prompts) * batch.n)]

        def repeat(index: int) -> None:
            reply = answer(batch.asked[index // batch.n], samples[index].whole(), None, time.monotonic() - began)
            show(reply | {"index": index} if batch.is_list else reply)

        def take(chunk: Json) -> None:
            for choice in chunk["choices"]:
                sample = samples[choice["index"]]
                sample.add(opened(choice))
                if sample.is_due():
                    repeat(choice["index"])

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
        for index, sample in enumerate(samples):
            if sample.choice.get("finish_reason") is None:
                sample.choice |= {"finish_reason": "abort"}
                sample.choice.setdefault("weight_version", self._fleet.version)
                repeat(index)


class _Sample:
    """One sample, joined from its chunks so far."""

    def __init__(self) -> None:
        self.choice: Json = {"prompt_token_ids": None}
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: dict[str, list[Any]] = {}
        self._shown = 0

    def add(self, choice: Json) -> None:
        self._texts.append(choice["text"])
        self._token_ids += choice.get("token_ids") or ()
        if (found := choice.get("logprobs")) is not None:
            for key in _LOGPROBS:
                self._logprobs.setdefault(key, []).extend(found.get(key) or ())
        prompt = self.choice["prompt_token_ids"] or choice.get("prompt_token_ids")
        self.choice = choice | {"prompt_token_ids": prompt}

    def is_due(self) -> bool:
        """True if the sample is to be repeated; notes that it is."""
        made = len(self._token_ids)
        if self.choice.get("finish_reason") is None and _SHORT_TOKENS < made < self._shown * (1 + _GROWTH):
            return False
        self._shown = made
        return True

    def whole(self) -> Json:
        """The choice with all that it has so far."""
        joined = {"text": "".join(self._texts), "token_ids": self._token_ids, "logprobs": self._logprobs or None}
        return self.choice | joined
