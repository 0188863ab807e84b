"""Weight updates at a cadence, as a trainer makes them between batches, through the weight store.

    python -m loadtests.updates http://127.0.0.1:8100 --every 5 --weights examples/tiny_model/digit-sort

A process of its own, since copying tensors would hold up the clocks of users beside it. Pushes the checkpoint's own
tensors as the next version, or with `--weights sim` those of simulated engines. Says `ready`, begins with the first
line of standard input, prints one line of JSON for each update, and ends when standard input does. The key is an admin
key, from ROLLOUT_GATEWAY_ADMIN_KEY.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import orjson
import torch
from safetensors.torch import load_file

from engines.config import SimConfig
from engines.errors import RolloutGatewayError
from trainer_client import BlockingRolloutClient, WeightSender

SIMULATED = "sim"
READY = "ready"


def tensors_of(weights: str) -> list[tuple[str, torch.Tensor]]:
    """What is pushed. Raises `FileNotFoundError` where the folder has no safetensors."""
    if weights == SIMULATED:
        return [(name, torch.zeros(shape)) for name, shape in SimConfig().tensors.items()]
    files = sorted(Path(weights).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"--weights {weights}: no safetensors there; give a checkpoint's folder, or 'sim'")
    return [(name, tensor) for file in files for name, tensor in load_file(file).items()]


def push_once(
    sender: WeightSender, tensors: Sequence[tuple[str, torch.Tensor]], *, rolling: bool | None
) -> dict[str, object]:
    """One update; an error is told and not raised, since the next may succeed."""
    began = time.perf_counter()
    try:
        version, error = sender.push(tensors, rolling=rolling), ""
    except RolloutGatewayError as refused:
        version, error = 0, f"{type(refused).__name__}: {refused}"
    return {"version": version, "error": error, "at": time.time(), "seconds": time.perf_counter() - began}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.updates", description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of the gateway")
    parser.add_argument("--every", type=float, required=True, metavar="S", help="seconds from one start to the next")
    parser.add_argument("--weights", default=SIMULATED, metavar="FOLDER", help="a checkpoint, or 'sim'")
    parser.add_argument("--rolling", action="store_true", help="replica after replica; else as the gateway is set")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="longest update")
    args = parser.parse_args(argv)
    try:
        tensors = tensors_of(args.weights)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    print(READY, flush=True)
    sys.stdin.readline()
    ending = threading.Event()
    threading.Thread(target=_wait_for_end_of_input, args=(ending,), daemon=True).start()
    key = os.environ.get("ROLLOUT_GATEWAY_ADMIN_KEY", "")
    with (
        BlockingRolloutClient(args.url, api_key=key) as client,
        WeightSender(client, transport="store", timeout_s=args.timeout_s) as sender,
    ):
        due = time.monotonic() + args.every
        while not ending.wait(max(0.0, due - time.monotonic())):
            due = max(due + args.every, time.monotonic())
            print(orjson.dumps(push_once(sender, tensors, rolling=args.rolling or None)).decode(), flush=True)
    return 0


def _wait_for_end_of_input(ending: threading.Event) -> None:
    while sys.stdin.readline():
        pass
    ending.set()


if __name__ == "__main__":
    sys.exit(main())
