"""What three ways to ask for one batch cost the gateway and the client: a request a prompt, one for all, one stream.

    python -m loadtests.fleet -c examples/sim.yaml engine.num_replicas=2          # prints URL and pid of the gateway
    python -m loadtests.studies.request_shapes --gateway URL --gateway-pid PID --batch 128x8 1024x1 --rounds 3

Prints one line of JSON for each batch and shape, with medians over the rounds: CPU-seconds per million tokens of the
gateway and of this client, and the seconds until the first completion and until the last.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import orjson

from loadtests.studies.compare import process_cpu_s
from trainer_client import RolloutClient, SamplingParams

Prompts = Sequence[Sequence[int]]
Shape = Callable[[str, Prompts, SamplingParams], Awaitable[tuple[float, int]]]
"""Seconds until the first completion was whole, and the tokens of all."""

_TIMEOUT = aiohttp.ClientTimeout(total=600.0)


async def for_each_prompt(url: str, prompts: Prompts, sampling: SamplingParams) -> tuple[float, int]:
    """What `RolloutClient` does."""
    began, first, tokens = time.monotonic(), 0.0, 0
    async with RolloutClient(url) as client:
        async for completion in client.generate(prompts, sampling):
            first = first or time.monotonic() - began
            tokens += len(completion.token_ids)
    return first, tokens


async def for_all(url: str, prompts: Prompts, sampling: SamplingParams) -> tuple[float, int]:
    """What TRL does."""
    began = time.monotonic()
    async with _asked(url, {"prompt": prompts, **sampling.body()}) as response:
        reply = orjson.loads(await response.read())
    return time.monotonic() - began, sum(len(choice["token_ids"]) for choice in reply["choices"])


async def one_stream(url: str, prompts: Prompts, sampling: SamplingParams) -> tuple[float, int]:
    """Chunks of all prompts, as coarse as the engines make them."""
    began, first, tokens, rest = time.monotonic(), 0.0, 0, b""
    body = {"prompt": prompts, "stream": True, "stream_interval": 32, **sampling.body()}
    async with _asked(url, body) as response:
        async for block in response.content.iter_any():
            *events, rest = (rest + block).split(b"\n\n")
            for event in events:
                if event == b"data: [DONE]":
                    continue
                for choice in orjson.loads(event.removeprefix(b"data: "))["choices"]:
                    tokens += len(choice["token_ids"])
                    if choice.get("finish_reason"):
                        first = first or time.monotonic() - began
    return first, tokens


@contextlib.asynccontextmanager
async def _asked(url: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
    async with (
        aiohttp.ClientSession(timeout=_TIMEOUT) as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        response.raise_for_status()
        yield response


SHAPES: tuple[Shape, ...] = (for_each_prompt, for_all, one_stream)


async def measure(args: argparse.Namespace, batch: str) -> None:
    num_prompts, n = (int(part) for part in batch.split("x"))
    sampling = SamplingParams(n=n, max_tokens=args.max_tokens, ignore_eos=True)
    runs: dict[str, list[tuple[float, float, float, float]]] = {shape.__name__: [] for shape in SHAPES}
    for turn in range(args.rounds):
        for shape in SHAPES:
            # Prompts of its own: equal ones would be answered from the prefix cache of the run before.
            prompts = [
                [1 + (turn + place * index + len(shape.__name__)) % 250 for place in range(args.prompt_tokens)]
                for index in range(num_prompts)
            ]
            gateway, client, began = process_cpu_s(args.gateway_pid), time.process_time(), time.monotonic()
            first, tokens = await shape(args.gateway, prompts, sampling)
            seconds = time.monotonic() - began
            millions = tokens / 1e6
            used = process_cpu_s(args.gateway_pid) - gateway, time.process_time() - client
            runs[shape.__name__].append((used[0] / millions, used[1] / millions, first, seconds))
    for name, measured in runs.items():
        columns = [round(statistics.median(column), 2) for column in zip(*measured, strict=True)]
        keys = ("gateway_cpu_s_per_million_tokens", "client_cpu_s_per_million_tokens", "first_s", "last_s")
        print(json.dumps({"batch": batch, "shape": name, **dict(zip(keys, columns, strict=True))}), flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateway", required=True, metavar="URL")
    parser.add_argument("--gateway-pid", type=int, required=True, metavar="PID")
    parser.add_argument("--batch", nargs="+", default=["128x8", "1024x1"], metavar="PROMPTSxN")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for batch in args.batch:
        await measure(args, batch)


if __name__ == "__main__":
    asyncio.run(main())
