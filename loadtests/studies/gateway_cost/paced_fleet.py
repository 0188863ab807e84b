"""CPU of one gateway, and of the readers beside its engines, while these make tokens at the pace of GPUs.

    python -m loadtests.studies.gateway_cost.paced_fleet [--replicas 64] [--rounds 2] [--json FILE]

Engines replay a recorded reply in chunks of 32 tokens, each at its time, so that they cost next to nothing. Each has a
process and a reader's process of its own. The cases: 512 requests of 256/512 tokens at once on one engine that takes
20 ms a step, whole and as streams; then batches of 1,024 prompts of 256/1,024 tokens on all replicas, 256 samples at
once and 20,000 tokens a second each. A run takes two to three minutes; 64 replicas need some eight cores.
"""

import argparse
import asyncio
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson

from engines.types import ReplicaInfo
from gateway.config.load import load
from loadtests.chaos.process_fleet import healthy_within
from loadtests.fleet import LocalFleet
from loadtests.own_process import Served, own_processes
from loadtests.studies.gateway_cost import canned_engine, reader
from loadtests.studies.gateway_cost.gateway_cpu import TOKEN_IDS

_SETTINGS = (
    "engine.kind=sim", "engine.num_replicas=1", "engine.max_num_seqs=512", "weights.store=null", "gateway.port=0",
    "gateway.ledger=null", "engine.sim.decode_step_s=0.0005", "engine.sim.decode_step_per_seq_s=0",
)  # fmt: skip
_CHUNK_TOKENS, _PROMPT_TOKENS = 32, 256
_AT_ONCE, _TOKENS_A_SECOND, _BATCH = 256, 20_000, 1024
_HEALTHY_S = 120.0
_SLACK = 5.0
"""A case that takes so many times the seconds that its engines need ends the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`clients` send requests of `prompts` prompts one after another. An engine takes `step_s` for a token of each
    sample."""

    name: str
    replicas: int
    clients: int
    prompts: int
    tokens: int
    step_s: float
    streams: bool = False

    @property
    def body(self) -> bytes:
        prompt = list(range(10, 10 + _PROMPT_TOKENS))
        body = {**TOKEN_IDS, "model": "sim", "prompt": [prompt] * self.prompts, "max_tokens": self.tokens}
        return orjson.dumps({**body, "stream": self.streams})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of a case: tokens delivered, seconds, those that its engines need, and CPU seconds."""

    case: str
    tokens: int
    seconds: float
    least_s: float
    gateway_s: float
    readers_s: float


def cases(replicas: int) -> list[Case]:
    single = Case(name="512 at once, 256/512", replicas=1, clients=512, prompts=1, tokens=512, step_s=0.02)
    return [
        single,
        dataclasses.replace(single, name="512 streams, 256/512", streams=True),
        Case(
            name=f"{replicas} replicas, batches of {_BATCH}, 256/1k",
            replicas=replicas,
            clients=max(1, replicas * _AT_ONCE // _BATCH),
            prompts=_BATCH,
            tokens=1024,
            step_s=_AT_ONCE / _TOKENS_A_SECOND,
        ),
    ]


async def measured(case: Case, rounds: int, fleet: LocalFleet, recorded: ReplicaInfo) -> Cost:
    """Run a case on a gateway of its own. Raise `TimeoutError` where it takes far longer than its engines need."""
    async with AsyncExitStack() as stack:
        event_s = _CHUNK_TOKENS * case.step_s
        engines = stack.enter_context(own_processes(canned_engine.serve, [(recorded.url, event_s)] * case.replicas))
        readers = stack.enter_context(own_processes(reader.serve, [(engine.url,) for engine in engines]))
        infos = [
            reader.read(dataclasses.replace(recorded, replica_id=f"engine-{place}"), engine.url, beside)
            for place, (engine, beside) in enumerate(zip(engines, readers, strict=True))
        ]
        gateway = await stack.enter_async_context(fleet.gateway(load(None, _SETTINGS), infos))
        await healthy_within(gateway.url, _HEALTHY_S)
        least_s = rounds * case.tokens * case.step_s
        timeout = aiohttp.ClientTimeout(total=_SLACK * least_s)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(gateway.url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        )
        await _ask(session, dataclasses.replace(case, prompts=case.replicas), 1)  # each engine records the reply
        ours, beside = Served(gateway.url, gateway.pid), Served("", 0, tuple(one.pid for one in readers))
        began, gateway_s, readers_s = time.monotonic(), ours.cpu_s, beside.cpu_s
        async with asyncio.timeout(_SLACK * least_s):
            await asyncio.gather(*(_ask(session, case, rounds) for _ in range(case.clients)))
        return Cost(
            case=case.name,
            tokens=rounds * case.clients * case.prompts * case.tokens,
            seconds=time.monotonic() - began,
            least_s=least_s,
            gateway_s=ours.cpu_s - gateway_s,
            readers_s=beside.cpu_s - readers_s,
        )


async def _ask(session: aiohttp.ClientSession, case: Case, rounds: int) -> None:
    for _ in range(rounds):
        headers = {"Content-Type": "application/json"}
        async with session.post("/v1/completions", data=case.body, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"the gateway answered {response.status}: {await response.text()}")
            async for _ in response.content.iter_any():
                pass


def table(costs: Sequence[Cost]) -> str:
    """Return rates, cores and CPU seconds a million tokens as a table of Markdown."""
    head = ["case", "tokens/s", "of the engines' pace", "gateway, cores", "gateway, CPU-s/Mtok", "readers, cores",
            "both, CPU-s/Mtok"]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for cost in costs:
        millions = cost.tokens / 1e6
        lines.append([
            cost.case,
            f"{cost.tokens / cost.seconds:,.0f}",
            f"{cost.least_s / cost.seconds:.2f}",
            f"{cost.gateway_s / cost.seconds:.2f}",
            f"{cost.gateway_s / millions:.2f}",
            f"{cost.readers_s / cost.seconds:.2f}",
            f"{(cost.gateway_s + cost.readers_s) / millions:.2f}",
        ])  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


async def _run(args: argparse.Namespace) -> list[Cost]:
    fleet = LocalFleet(load(None, _SETTINGS))
    try:
        (recorded,) = await fleet.start_engines()
        return [await measured(case, args.rounds, fleet, recorded) for case in cases(args.replicas)]
    finally:
        await fleet.stop()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.gateway_cost.paced_fleet", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--replicas", type=int, default=64, help="of the case with batches")
    parser.add_argument("--rounds", type=int, default=2, help="requests of each client")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    args = parser.parse_args()
    costs = asyncio.run(_run(args))
    print(table(costs))
    if args.json:
        report = {
            "cpus": os.cpu_count(),
            "replicas": args.replicas,
            "costs": [dataclasses.asdict(one) for one in costs],
        }
        args.json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
