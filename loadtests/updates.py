"""Periodic weight updates through the weight store, like a trainer's between batches.

    python -m loadtests.updates http://127.0.0.1:8100 --every 5 --weights examples/tiny_model/digit-sort

A separate process, since copies of tensors would delay the users' clocks. Pushes the checkpoint's tensors as the next
version, or with `--weights sim` those of simulated engines. Prints `ready`, starts at the first line of standard input,
prints a line of JSON per update, and ends with standard input. The admin key is ROLLOUT_GATEWAY_ADMIN_KEY.
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
    """Return the tensors to push. Raise `SystemExit` if the folder has no safetensors."""
    if weights == SIMULATED:
        return [(name, torch.zeros(shape)) for name, shape in SimConfig().tensors.items()]
    files = sorted(Path(weights).glob("*.safetensors"))
    if not files:
        raise SystemExit(f"--weights {weights}: no safetensors there; give a checkpoint's folder, or 'sim'")
    return [(name, tensor) for file in files for name, tensor in load_file(file).items()]


def push_once(sender: WeightSender, tensors: Sequence[tuple[str, torch.Tensor]]) -> dict[str, object]:
    """Push one update and return its report. An error is reported, not raised, since the next update may succeed."""
    began = time.perf_counter()
    try:
        version, error = sender.push(tensors), ""
    except RolloutGatewayError as refused:
        version, error = 0, f"{type(refused).__name__}: {refused}"
    return {"version": version, "error": error, "at": time.time(), "seconds": time.perf_counter() - began}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.updates", description=__doc__.splitlines()[0])
    parser.add_argument("url", help="the gateway's URL")
    parser.add_argument("--every", type=float, required=True, metavar="S", help="seconds from one start to the next")
    parser.add_argument("--weights", default=SIMULATED, metavar="FOLDER", help="a checkpoint, or 'sim'")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="limit on an update")
    args = parser.parse_args(argv)
    tensors = tensors_of(args.weights)
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
            print(orjson.dumps(push_once(sender, tensors)).decode(), flush=True)
    return 0


def _wait_for_end_of_input(ending: threading.Event) -> None:
    while sys.stdin.readline():
        pass
    ending.set()


if __name__ == "__main__":
    sys.exit(main())
