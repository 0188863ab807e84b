"""Whether updates leave the weights that were sent: small random models behind a gateway, judged by transformers.

    python -m loadtests.studies.weights.served_check -c FILE.yaml dense experts --transport nccl --device cuda:0
    python -m loadtests.studies.weights.served_check -c FILE.yaml dense --transport trl --device cuda:0 --json out.json

The file names the engines, of any kind; their model is replaced. After each update log-probabilities of prompts and of
tokens that the engines have made are compared with those of transformers on the weights that were sent, and with those
on the weights before, which are far away. Then an update is refused by the canary (not with TRL's client, which sends
no log-probs), and the version before has to be back.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.config import EngineConfig
from engines.errors import WeightUpdateFailed
from gateway.config.load import load
from loadtests.fleet import LocalFleet
from loadtests.studies.weights.checked_models import KINDS, MADE_TOKENS, Checked, Models, prompts, verdict
from loadtests.studies.weights.pusher import Way, sender_of
from trainer_client import BlockingRolloutClient

_TIMEOUT_S = 120.0
_SETTINGS = {"fp8": ("engine.quantization=fp8",), "LoRA on": ("engine.enable_lora=true",)}
"""The engine's settings for the second word of a kind."""


class Subject:
    """The gateway under test."""

    def __init__(self, url: str, models: Models) -> None:
        self._url = url
        self._models = models

    def judged(self, version: int, way: str, before: int) -> Checked:
        answers = self._complete()
        made = [choice["token_ids"] for choice in answers]
        told = [_told(choice, ids) for choice, ids in zip(answers, prompts(), strict=True)]
        return self._models.judged(version, way, before, made, told)

    def _complete(self) -> list[Any]:
        body = {"prompt": prompts(), "max_tokens": MADE_TOKENS, "temperature": 0, "ignore_eos": True}
        asked = body | {"logprobs": 0, "prompt_logprobs": 0, "return_token_ids": True}
        request = urllib.request.Request(f"{self._url}/v1/completions", json.dumps(asked).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return list(json.load(response)["choices"])


async def check(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """All versions of one kind, with engines of their own."""
    with tempfile.TemporaryDirectory() as folder:
        models = Models(kind, Path(folder), args.device)
        settings = _SETTINGS.get(kind.partition(", ")[2], ())
        config = load(args.config, [*settings, *args.overrides, f"engine.model={models.path(0)}", "gateway.port=0"])
        fleet = LocalFleet(config)
        try:
            infos, gateway = await fleet.start()
            is_dummy = config.engine.load_format == "dummy"
            found = await asyncio.to_thread(_checked, gateway.url, models, kind, args, has_dummy_weights=is_dummy)
            engines = sorted({f"{info.kind} {info.engine_version}" for info in infos})
            device = "GPU" if args.device.startswith("cuda") else "CPU"
            told = {"engine": " and ".join(engines), "device": device, "split": _split(config.engine)}
            return told | found
        finally:
            await fleet.stop()


def _checked(
    url: str, models: Models, kind: str, args: argparse.Namespace, *, has_dummy_weights: bool
) -> dict[str, Any]:
    subject, seconds, transport = Subject(url, models), [], args.transport
    with BlockingRolloutClient(url) as client, sender_of(client, transport, args.device, _TIMEOUT_S) as sender:
        found = [] if has_dummy_weights else [subject.judged(0, "the checkpoint", 1)]
        for version in range(1, args.updates + 1):
            tensors, began = models.sent(version), time.perf_counter()
            sender.push(tensors)
            seconds.append(time.perf_counter() - began)
            found.append(subject.judged(version, transport, version - 1))
        if transport != "trl":
            _refuse(client, sender, models, args.updates)
            found.append(subject.judged(args.updates, "after a refused update", args.updates + 1))
    right = all(one.is_right for one in found)
    versions = [asdict(one) for one in found]
    return {"kind": kind, "transport": transport, "is_right": right, "push_s": seconds, "versions": versions}


def _refuse(client: BlockingRolloutClient, sender: Any, models: Models, served: int) -> None:
    """Push the version `served` again, then the next with log-probs of the trainer's that are far from those before."""
    count = len(client.canary_token_ids()) - 1
    sender.push(models.sent(served), canary_logprobs=[-1.0] * count)
    try:
        sender.push(models.sent(served + 1), canary_logprobs=[-1000.0] * count)
    except WeightUpdateFailed:
        client.wait_ready(_TIMEOUT_S)
        return
    raise SystemExit("the canary let pass what it should not: weights.canary.enabled must be true")


def _split(engine: EngineConfig) -> str:
    """Return the words for how a replica's GPUs share the model, "" for one GPU."""
    sizes = {"TP": engine.tensor_parallel_size, "PP": engine.pipeline_parallel_size}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    has_experts_apart = bool(engine.extra.get("enable_expert_parallel")) or engine.extra.get("ep_size", 1) > 1
    return " ".join([*parts, *(["EP"] if has_experts_apart else [])])


def _told(choice: Any, ids: Sequence[int]) -> list[float]:
    """Log-probabilities of all tokens but the first of the prompt `ids` and what was made."""
    scored = zip(choice["prompt_logprobs"][1:], ids[1:], strict=True)
    made: list[float] = choice["logprobs"]["token_logprobs"]
    return [*(entry[str(token)]["logprob"] for entry, token in scored), *made]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 where a version is not what was sent."""
    ways: tuple[Way, ...] = ("nccl", "gloo", "store", "trl")
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.weights.served_check", description=__doc__.splitlines()[0]
    )
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("-c", "--config", type=Path, required=True, metavar="FILE")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--transport", choices=ways, default="nccl")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    reports = []
    for kind in args.kinds:
        reports.append(report := asyncio.run(check(kind, args)))
        print(f"{kind}, {args.transport}: {verdict(report)}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(reports, indent=2))
    return 0 if all(report["is_right"] for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
