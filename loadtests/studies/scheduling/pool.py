"""Batches out of a pool beside batches that wait for all their groups, on the same engines, run after run.

    python -m loadtests.fleet -c FILE.yaml engine.load_format=dummy engine.stream_interval=4 -- \\
        python -m loadtests.studies.scheduling.pool --url {url} --size 24 --json out.json

A pair is one run of either side, of `--batches` batches of `--prompts` prompts with `--samples` samples; its order
alternates. Lengths are the model's own: with dummy weights each token is the end with the same chance, so that they
have a long tail. Weights do not change. A figure is the time of all batches, and that time for a token taken.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from trainer_client import Rollout, RolloutClient, RolloutPool, SamplingParams

_PROMPT_TOKENS = 16
_TOKEN_IDS = range(5, 40)


@dataclass(frozen=True, slots=True)
class Run:
    side: str
    seconds: float
    tokens: int
    longest: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def _prompts(draw: random.Random) -> Iterator[list[int]]:
    while True:
        yield draw.choices(_TOKEN_IDS, k=_PROMPT_TOKENS)


async def _plain(client: RolloutClient, args: argparse.Namespace, sampling: SamplingParams, seed: int) -> list[Rollout]:
    prompts = _prompts(random.Random(seed))
    return [
        rollout
        for _ in range(args.batches)
        for rollout in await client.generate(list(islice(prompts, args.prompts)), sampling).gather()
    ]


async def _pooled(
    client: RolloutClient, args: argparse.Namespace, sampling: SamplingParams, seed: int
) -> list[Rollout]:
    async with RolloutPool(client, _prompts(random.Random(seed)), sampling, size=args.size) as pool:
        return [rollout for _ in range(args.batches) for rollout in await pool.batch(args.prompts)]


async def _run(client: RolloutClient, args: argparse.Namespace, side: str, seed: int) -> Run:
    sampling = SamplingParams(n=args.samples, max_tokens=args.max_tokens)
    began = time.monotonic()
    rollouts = await (_pooled if side == "pool" else _plain)(client, args, sampling, seed)
    seconds = time.monotonic() - began
    lengths = [len(completion.token_ids) for rollout in rollouts for completion in rollout.completions]
    run = Run(side, round(seconds, 3), sum(lengths), max(lengths))
    print(f"{side:5}  {seconds:6.1f} s  {run.tokens_per_s:6.0f} tokens/s  {len(lengths)} samples", flush=True)
    return run


async def _pairs(args: argparse.Namespace) -> list[Run]:
    runs: list[Run] = []
    async with RolloutClient(args.url) as client:
        await client.wait_ready()
        for pair in range(args.pairs):
            for side in ("plain", "pool") if pair % 2 == 0 else ("pool", "plain"):
                runs.append(await _run(client, args, side, pair))
    return runs


def _ratios(runs: Sequence[Run]) -> None:
    plain, pool = ([run for run in runs if run.side == side] for side in ("plain", "pool"))
    times = (after.seconds / before.seconds for before, after in zip(plain, pool, strict=True))
    each = (before.tokens_per_s / after.tokens_per_s for before, after in zip(plain, pool, strict=True))
    print("time, pool over plain: " + ", ".join(f"{ratio:.2f}" for ratio in times))
    print("the same for a token: " + ", ".join(f"{ratio:.2f}" for ratio in each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--prompts", type=int, default=16, help="groups of a batch")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--size", type=int, default=24, help="groups of the pool")
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=480)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs = asyncio.run(_pairs(args))
    _ratios(runs)
    if args.json:
        args.json.write_text(json.dumps([asdict(run) for run in runs], indent=1))


if __name__ == "__main__":
    main()
