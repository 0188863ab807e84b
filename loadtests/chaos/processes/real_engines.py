"""A fleet of real vLLM engines on CPU for a soak: its configuration, the witness of its rollouts, its trainer.

The trainer pushes the checkpoint's own tensors as each version, so the greedy answer to a prompt never changes.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engines.config import SimConfig
from engines.process.port import free_port
from gateway.config.load import load
from gateway.config.schema import Config
from loadtests.chaos.contents import Asked, Delivered, Flaw
from loadtests.chaos.witness import Witness

Json = dict[str, Any]

_EXAMPLE = Path("examples/tiny-cpu.yaml")
_PROMPTS, _TOKENS, _PROBLEMS = 8, 48, 64


def real_config(replicas: int, folder: Path, *settings: str) -> Config:
    """Return the configuration of examples/tiny-cpu.yaml with a port and a name of its own, and with `settings`."""
    overrides = [
        f"name=soak-vllm-{os.getpid()}",
        f"gateway.port={free_port()}",
        f"engine.num_replicas={replicas}",
        f"engine.log_dir={folder}",
        *settings,
    ]
    return load(_EXAMPLE, overrides)


class GreedyWitness(Witness):
    """Compares each greedy sample with the first answer to its prompt."""

    def __init__(self, url: str, *, num_clients: int, bound_s: float) -> None:
        super().__init__(url, SimConfig(), num_clients=num_clients, bound_s=bound_s)
        self.tokens = _TOKENS
        self._answers: dict[int, Sequence[int]] = {}

    def _numbered(self, number: int) -> tuple[list[Asked], Json]:
        problems = _problems(number)
        asked = [Asked([problem], self.tokens, self.version, is_greedy=True) for problem in problems]
        return asked, self._body(prompt=[_prompt(problem) for problem in problems], temperature=0.0)

    def _flaw(self, asked: Asked, got: Delivered) -> Flaw | None:
        (problem,) = asked.prompt
        first = self._answers.setdefault(problem, got.token_ids)
        if len(got.token_ids) != _TOKENS:
            return Flaw(f"{len(got.token_ids)} tokens, {_TOKENS} were requested")
        if got.token_ids != first:
            place = next(place for place in range(_TOKENS) if got.token_ids[place] != first[place])
            return Flaw(
                f"token {place} of prompt {_prompt(problem)!r} differs from the first answer's; spans {got.spans}"
            )
        oldest = min(version for version, _, _ in got.spans)
        if oldest < asked.floor:
            return Flaw(f"version {oldest}, requested when the fleet was at {asked.floor}", is_stale=True)
        return None


def _problems(seed: int) -> list[int]:
    return [(_PROMPTS * seed + place) % _PROBLEMS for place in range(_PROMPTS)]


def _prompt(problem: int) -> str:
    return str(7_919 * (problem + 1))


@asynccontextmanager
async def store_trainer(url: str, witness: Witness, checkpoint: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Yield a call that pushes the checkpoint's tensors as the next version."""
    from loadtests.updates import tensors_of
    from trainer_client import BlockingRolloutClient, WeightSender

    tensors = tensors_of(checkpoint)
    client = await asyncio.to_thread(BlockingRolloutClient, url)
    sender = WeightSender(client, transport="store", timeout_s=60.0)

    async def push() -> None:
        witness.version = max(witness.version, await asyncio.to_thread(sender.push, tensors))

    try:
        yield push
    finally:
        await asyncio.to_thread(sender.close)
        await asyncio.to_thread(client.close)
