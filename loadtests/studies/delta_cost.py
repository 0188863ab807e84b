"""What a version through the store costs whole and as a delta, when a share of all elements changes in every step.

    python -m loadtests.studies.delta_cost --changed 0.014 0.09 --pairs 5 [--store FOLDER] [--json out.json]

A gateway over one simulated engine, bfloat16 tensors of Qwen2-0.5B's shapes. In each pair the elements change at random
places; a trainer with `delta=True` pushes them, then one without pushes the same bytes, so that the next delta has them
as its base. A machine that shares no folder fetches the first beside the version before, and the second into an empty
place. Seconds of CPU are those of the process that pushes or fetches, and of the gateway's beside it.
"""

import argparse
import asyncio
import http.client
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

from engines.store.manifest import Manifest
from engines.store.peer_store import PeerStore
from gateway.config.load import load
from loadtests.fleet import LocalFleet
from trainer_client import BlockingRolloutClient, WeightSender

_HIDDEN, _INNER, _KV, _VOCABULARY = 896, 4864, 128, 151936
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one version. `written` is what the trainer wrote, `received` what the other machine was sent, in bytes."""

    pair: int
    changed: float
    delta: bool
    written: int
    received: int
    push_s: float
    push_cpu_s: float
    push_gateway_cpu_s: float
    fetch_s: float
    fetch_cpu_s: float
    fetch_gateway_cpu_s: float


class CountedPeer(PeerStore):
    """Counts the bytes of the bodies that it is sent."""

    received = 0

    def get(self, connection: http.client.HTTPConnection, path: str, span: str = "") -> http.client.HTTPResponse:
        answer = super().get(connection, path, span)
        self.received += answer.length or 0
        return answer


class Watch:
    """Seconds and seconds of CPU since it was made, here and in the gateway."""

    def __init__(self, gateway: psutil.Process) -> None:
        self._gateway = gateway
        self._began = self._now()

    def read(self) -> list[float]:
        return [now - then for now, then in zip(self._now(), self._began, strict=True)]

    def _now(self) -> tuple[float, float, float]:
        used = self._gateway.cpu_times()
        return time.perf_counter(), time.process_time(), used.user + used.system


class Bench:
    """A trainer twice, with and without `delta`, and a machine that fetches."""

    def __init__(self, url: str, pid: int, store: Path, there: Path, shapes: dict[str, list[int]]) -> None:
        self._gateway = psutil.Process(pid)
        self._client = BlockingRolloutClient(url)
        self._peer = CountedPeer(url)
        self._store, self._there = store, there
        import torch

        torch.manual_seed(0)
        self._tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02) for name, shape in shapes.items()
        }
        self._senders = {
            delta: WeightSender(
                self._client, transport="store", dtype=torch.bfloat16, delta=delta, timeout_s=_TIMEOUT_S
            )
            for delta in (True, False)
        }

    def measure(self, shares: Sequence[float], pairs: int) -> Iterator[Cost]:
        self._both(-1, 0.0)
        for share in shares:
            for pair in range(pairs):
                self._change(share)
                yield from self._both(pair, share)

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._client.close()

    def _change(self, share: float) -> None:
        """The lowest bit of so many elements of each tensor."""
        import torch

        for tensor in self._tensors.values():
            bits = tensor.view(-1).view(torch.int16)
            bits ^= (torch.rand(bits.numel()) < share).to(torch.int16)

    def _both(self, pair: int, share: float) -> list[Cost]:
        return [self._version(pair, share, delta=delta) for delta in (True, False)]

    def _version(self, pair: int, share: float, *, delta: bool) -> Cost:
        watch = Watch(self._gateway)
        version = self._senders[delta].push(self._tensors)
        push_s, push_cpu_s, push_gateway_cpu_s = watch.read()
        place = self._there if delta else self._there / "empty"
        self._peer.received, watch = 0, Watch(self._gateway)
        self._peer.fetch(version, place / f"v{version}", _TIMEOUT_S)
        fetch_s, fetch_cpu_s, fetch_gateway_cpu_s = watch.read()
        received = self._peer.received
        if not delta:
            shutil.rmtree(self._there)
            self._peer.fetch(version, self._there / f"v{version}", _TIMEOUT_S)
        return Cost(
            pair=pair,
            changed=share,
            delta=delta,
            written=_written(self._store / f"v{version}"),
            received=received,
            push_s=push_s,
            push_cpu_s=push_cpu_s,
            push_gateway_cpu_s=push_gateway_cpu_s,
            fetch_s=fetch_s,
            fetch_cpu_s=fetch_cpu_s,
            fetch_gateway_cpu_s=fetch_gateway_cpu_s,
        )


def summarise(costs: Sequence[Cost]) -> list[dict[str, Any]]:
    """By share of elements: the median of each side, and of the ratios of pairs.

    There is no ratio where a whole version cost nothing that could be measured: CPU seconds come in ticks of 10 ms.
    """
    rows = []
    for share in dict.fromkeys(cost.changed for cost in costs):
        deltas, wholes = (
            [one for one in costs if one.changed == share and one.delta is delta] for delta in (True, False)
        )
        row: dict[str, Any] = {"changed": share, "pairs": len(deltas)}
        for key in (
            "written",
            "received",
            "push_s",
            "push_cpu_s",
            "push_gateway_cpu_s",
            "fetch_s",
            "fetch_cpu_s",
            "fetch_gateway_cpu_s",
        ):
            pairs = [(getattr(one, key), getattr(other, key)) for one, other in zip(deltas, wholes, strict=True)]
            row[key] = {
                "delta": statistics.median(one for one, _ in pairs),
                "whole": statistics.median(other for _, other in pairs),
                "ratio": statistics.median(one / other for one, other in pairs)
                if all(whole for _, whole in pairs)
                else None,
            }
        rows.append(row)
    return rows


def shapes_of(layers: int) -> dict[str, list[int]]:
    """Qwen2-0.5B's tensors, the tied head left out, with so many of its 24 layers."""
    shapes = {"model.embed_tokens.weight": [_VOCABULARY, _HIDDEN], "model.norm.weight": [_HIDDEN]}
    for layer in range(layers):
        of_layer = {
            "self_attn.q_proj.weight": [_HIDDEN, _HIDDEN],
            "self_attn.k_proj.weight": [_KV, _HIDDEN],
            "self_attn.v_proj.weight": [_KV, _HIDDEN],
            "self_attn.o_proj.weight": [_HIDDEN, _HIDDEN],
            "self_attn.q_proj.bias": [_HIDDEN],
            "self_attn.k_proj.bias": [_KV],
            "self_attn.v_proj.bias": [_KV],
            "mlp.gate_proj.weight": [_INNER, _HIDDEN],
            "mlp.up_proj.weight": [_INNER, _HIDDEN],
            "mlp.down_proj.weight": [_HIDDEN, _INNER],
            "input_layernorm.weight": [_HIDDEN],
            "post_attention_layernorm.weight": [_HIDDEN],
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def _written(version: Path) -> int:
    """What the trainer wrote of it: files of tensors that came whole, and of changes."""
    tensors = Manifest.read(version).tensors.values()
    files = {tensor.changes or tensor.file for tensor in tensors}
    return sum((version / file).stat().st_size for file in files)


async def _measured(args: argparse.Namespace) -> list[Cost]:
    shapes = shapes_of(args.layers)
    store = Path(tempfile.mkdtemp(prefix="delta-cost-", dir=args.store))
    tensors = orjson.dumps(shapes).decode()
    overrides = [
        "engine.kind=sim",
        "gateway.port=0",
        f"engine.sim.tensors={tensors}",
        f"weights.store={store / 'store'}",
    ]
    fleet = LocalFleet(load(None, overrides), [])
    try:
        _, (gateway,) = await fleet.start()
        bench = Bench(gateway.url, gateway.pid, store / "store", store / "there", shapes)
        try:
            return await asyncio.to_thread(lambda: list(bench.measure(args.changed, args.pairs)))
        finally:
            bench.close()
    finally:
        await fleet.stop()
        shutil.rmtree(store, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.studies.delta_cost", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--changed", nargs="+", type=float, default=[0.014, 0.09], help="share of elements, from 0 to 1")
    add("--pairs", type=int, default=5)
    add("--layers", type=int, default=24)
    add(
        "--store",
        type=Path,
        default=Path("/dev/shm"),
        metavar="FOLDER",
        help="where the store is, and the machine that fetches",
    )
    add("--json", type=Path, metavar="FILE", help="write every version's cost and the summary")
    args = parser.parse_args(argv)
    costs = asyncio.run(_measured(args))
    rows = summarise(costs)
    for row in rows:
        told = {key: value for key, value in row.items() if key not in ("changed", "pairs")}
        print(f"{row['changed']:.3g} of the elements changed, {row['pairs']} pairs; delta, whole, delta / whole:")
        for key, one in told.items():
            ratio = "-" if one["ratio"] is None else f"{one['ratio']:.3f}"
            print(f"  {key:>20} {one['delta']:>14.6g} {one['whole']:>14.6g} {ratio}")
    if args.json:
        taken = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        report = {"taken": taken, "cpus": os.cpu_count(), "summary": rows, "versions": [asdict(cost) for cost in costs]}
        args.json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
