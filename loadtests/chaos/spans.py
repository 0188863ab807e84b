"""Spans of real vLLM replicas on CPU through updates, deaths and stalls: is each token of its span's version?

    python -m loadtests.chaos.spans [--completions 1000] [--clients 4] [--minutes 60] [--json out.json]

Each version has other weights. Updates take turns through all ways with rollouts in flight; every few seconds a
replica is killed (kill -9), or stands still (SIGSTOP) until its rollouts have gone on elsewhere. The log-prob of each
token is computed again with transformers, by the weights of its span: on KV of the same weights, or, as rollouts that
were frozen keep theirs, on the KV of the spans before. The exit status is 1 if a token has no span or another log-prob.
"""

import argparse
import asyncio
import copy
import dataclasses
import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from engines.errors import RolloutGatewayError
from engines.types import InFlight
from loadtests.chaos.callers import BrokenOff, choices_of, streamed_choices_of
from loadtests.chaos.contents import Delivered
from loadtests.chaos.processes.process_fleet import ProcessFleet, healthy_within, running
from loadtests.chaos.processes.real_engines import real_config
from loadtests.updates import tensors_of

if TYPE_CHECKING:
    import torch


_TOKENS, _SAMPLES = 240, 2
_TOLERANCE = 2e-3
"""Nats: what two orders of summation in float32 make of a log-prob is 1e-5."""
_CHANGE = 0.02
"""Relative size of a version's change of each weight, which moves log-probs by 0.1 nats and more."""
_UPDATE_EVERY_S, _FAULT_EVERY_S, _STOPPED_S = 4.0, 12.0, 8.0
_BOUND_S, _RETRY_S = 180.0, 0.5


Sample = tuple[list[int], Delivered]
"""A prompt, and a completion of it."""


def is_covered(got: Delivered) -> bool:
    """Return True if its spans name each token once, in order, and no version twice in a row."""
    starts, ends = [start for _, start, _ in got.spans], [end for _, _, end in got.spans]
    follow = all(before[0] != after[0] for before, after in itertools.pairwise(got.spans))
    return follow and starts == [0, *ends[:-1]] and ends[-1:] == [len(got.token_ids)]


@dataclass(slots=True)
class Result:
    """The counts of a run. `worst` is the largest difference of a log-prob in nats, of those within the tolerance."""

    completions: int = 0
    several_versions: int = 0
    without_limits: int = 0
    wrong: int = 0
    worst: float = 0.0
    requests_failed: int = 0
    updates: dict[str, int] = field(default_factory=dict)
    updates_refused: int = 0
    kills: int = 0
    stalls: int = 0
    seconds: float = 0.0
    examples: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return self.completions > 0 and not (self.without_limits or self.wrong)


class Versions:
    """The weights of each version: those of the checkpoint, and changes of them drawn by the version's number."""

    def __init__(self, checkpoint: str) -> None:
        from transformers import AutoModelForCausalLM

        self._base = tensors_of(checkpoint)
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").eval()
        self._models: dict[int, Any] = {0: self._model}

    def tensors(self, number: int) -> "list[tuple[str, torch.Tensor]]":
        import torch

        draw = torch.Generator().manual_seed(number)
        changed = ((name, tensor, torch.randn(tensor.shape, generator=draw)) for name, tensor in self._base)
        return [(name, tensor * (1 + _CHANGE * noise)) for name, tensor, noise in changed]

    def add(self, version: int, number: int) -> None:
        """Note that `version` is of the weights of this number, and so are those since the last: a push that was
        committed may have raised, and is sent again."""
        model = copy.deepcopy(self._model)
        model.load_state_dict(dict(self.tensors(number)), strict=False)
        model.tie_weights()
        for one in range(max(self._models) + 1, version + 1):
            self._models[one] = model

    def worst(self, prompt: list[int], got: Delivered) -> float:
        """The largest difference of a log-prob of the completion from what its spans' weights make of it."""
        told = [float("nan") if score is None else score for score in got.logprobs or ()]
        found = [self._scores(prompt, got, first) for first in range(len(got.spans))]
        differences = [
            min((abs(scores[place] - score) for scores in found if place in scores), default=float("inf"))
            for place, score in enumerate(told)
        ]
        return max((one if one == one else float("inf") for one in differences), default=0.0)

    def _scores(self, prompt: list[int], got: Delivered, first: int) -> dict[int, float]:
        """Log-probs by place of the tokens from span `first` on, whose weights have read all before. Each later span
        is read on the KV so far."""
        import torch

        read, cache, scores = 0, None, dict[int, float]()
        whole = torch.tensor([[*prompt, *got.token_ids]])
        for version, start, end in got.spans[first:]:
            assert start is not None
            assert end is not None
            last = len(prompt) + end - 1
            with torch.inference_mode():
                made = self._models[version](whole[:, read:last], past_key_values=cache, use_cache=True)
            cache, logprobs = made.past_key_values, made.logits[0].log_softmax(-1)
            for place in range(start, end):
                at = len(prompt) + place
                scores[place] = float(logprobs[at - 1 - read, whole[0, at]])
            read = last
        return scores


class Run:
    """The clients, the trainer and the faults of one fleet."""

    def __init__(self, fleet: ProcessFleet, versions: Versions, completions: int) -> None:
        self.fleet = fleet
        self.versions = versions
        self.samples: list[Sample] = []
        self.result = Result()
        self._prompts = iter(range(completions // _SAMPLES))

    async def client(self, session: aiohttp.ClientSession, *, stream: bool) -> None:
        """Ask for completions until enough are made."""
        for number in self._prompts:
            prompt = [2, *(5 + int(digit) for digit in str(7_919 * (number + 1))), 3]
            while True:
                try:
                    self.samples += await self._asked(session, prompt, stream=stream)
                except (aiohttp.ClientError, TimeoutError, BrokenOff) as error:
                    self.result.requests_failed += 1
                    print(f"a request failed: {error}", flush=True)
                    await asyncio.sleep(_RETRY_S)
                else:
                    break

    async def _asked(self, session: aiohttp.ClientSession, prompt: list[int], *, stream: bool) -> list[Sample]:
        body = {
            "prompt": prompt, "n": _SAMPLES, "max_tokens": _TOKENS, "temperature": 1.0, "logprobs": 0,
            "ignore_eos": True, "return_token_ids": True, "stream": stream,
        }  # fmt: skip
        ask = streamed_choices_of if stream else choices_of
        choices = await ask(session, "/v1/completions", orjson.dumps(body))
        if len(choices) != _SAMPLES:
            raise BrokenOff(f"{len(choices)} samples came, {_SAMPLES} were requested")
        return [(prompt, Delivered.of_choice(choice)) for choice in choices]

    async def trainer(self, url: str) -> None:
        """Push version after version; one that is refused is pushed again."""
        from trainer_client import BlockingRolloutClient, WeightSender

        client = await asyncio.to_thread(BlockingRolloutClient, url)
        sender = WeightSender(client, transport="store", timeout_s=_BOUND_S)
        try:
            for number, in_flight in enumerate(itertools.cycle(InFlight), 1):
                await self._push(sender, number, in_flight)
        finally:
            await asyncio.to_thread(sender.close)
            await asyncio.to_thread(client.close)

    async def _push(self, sender: Any, number: int, in_flight: InFlight) -> None:
        tensors = self.versions.tensors(number)
        while True:
            await asyncio.sleep(_UPDATE_EVERY_S)
            try:
                version = await asyncio.to_thread(sender.push, tensors, in_flight=in_flight)
            except RolloutGatewayError as error:
                self.result.updates_refused += 1
                print(f"update refused: {error}", flush=True)
                continue
            self.versions.add(version, number)
            self.result.updates[in_flight.value] = self.result.updates.get(in_flight.value, 0) + 1
            return

    async def faults(self) -> None:
        for number in itertools.count():
            await asyncio.sleep(_FAULT_EVERY_S)
            await self.fleet.complete()
            victim = number // 2 % self.fleet.size
            if number % 2:
                self.result.stalls += 1
                self.fleet.signal(victim, signal.SIGSTOP)
                await asyncio.sleep(_STOPPED_S)
                with suppress(ProcessLookupError, KeyError):
                    self.fleet.signal(victim, signal.SIGCONT)
            else:
                self.result.kills += 1
                with suppress(aiohttp.ClientError, TimeoutError):
                    await self.fleet.kill(victim)

    def judge(self) -> None:
        """Compute the log-probs of all samples again."""
        for prompt, got in self.samples:
            self.result.completions += 1
            self.result.several_versions += len(got.spans) > 1
            if not is_covered(got):
                self.result.without_limits += 1
                self._note(f"spans {got.spans} over {len(got.token_ids)} tokens")
            elif (worst := self.versions.worst(prompt, got)) > _TOLERANCE:
                self.result.wrong += 1
                self._note(f"a log-prob is {worst:.4f} nats off, spans {got.spans}")
            else:
                self.result.worst = max(self.result.worst, worst)

    def _note(self, example: str) -> None:
        if len(self.result.examples) < 10:
            self.result.examples.append(example)


async def run(completions: int, clients: int, minutes: float) -> Result:
    """Run a fleet of two replicas in processes of their own until so many completions are made."""
    with tempfile.TemporaryDirectory(prefix="spans-") as folder:
        config = real_config(2, Path(folder), "fleet.stalled_after_s=3", "gateway.ledger=null")
        fleet, began = ProcessFleet(config, Path(folder)), time.monotonic()
        made = Run(fleet, await asyncio.to_thread(Versions, config.engine.model), completions)
        async with running(fleet):
            await healthy_within(fleet.url, _BOUND_S)
            timeout = aiohttp.ClientTimeout(total=_BOUND_S)
            async with aiohttp.ClientSession(fleet.url, timeout=timeout, read_bufsize=1 << 20) as session:
                asking = [asyncio.create_task(made.client(session, stream=bool(one % 2))) for one in range(clients)]
                around = [asyncio.create_task(one) for one in (made.trainer(fleet.url), made.faults())]
                try:
                    asked = asyncio.ensure_future(asyncio.wait(asking, return_when="FIRST_EXCEPTION"))
                    await asyncio.wait([asked, *around], timeout=60 * minutes, return_when="FIRST_COMPLETED")
                finally:
                    for task in (*asking, *around):
                        task.cancel()
                    ended = await asyncio.gather(*asking, *around, return_exceptions=True)
            for error in ended:
                if isinstance(error, Exception):
                    raise error
        made.result.seconds = time.monotonic() - began
        await asyncio.to_thread(made.judge)
        return made.result


def _rows(result: Result) -> Iterator[str]:
    for name, value in dataclasses.asdict(result).items():
        yield f"{name:<18} {value:.2g}" if isinstance(value, float) else f"{name:<18} {value}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.chaos.spans", description=__doc__.splitlines()[0])
    parser.add_argument("--completions", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    result = asyncio.run(run(args.completions, args.clients, args.minutes))
    print("\n".join(_rows(result)))
    if args.json:
        args.json.write_bytes(orjson.dumps(dataclasses.asdict(result), option=orjson.OPT_INDENT_2))
    return 0 if result.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
