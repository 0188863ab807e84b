"""CPU of a gateway whose replicas are idle: probes, pages and rounds of discovery, as a share of one core.

    python -m loadtests.studies.gateway_cost.idle_cpu [--replicas 256] [--seconds 10] [KEY=VALUE ...]

The engines are one process of canned answers. The figure is CPU time of the gateway's process over that of the clock,
for three stretches, so other work on the machine matters little.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from engines.types import EngineKind, ReplicaInfo
from gateway.config.load import load
from loadtests.studies.gateway_cost import idle_engines
from loadtests.studies.gateway_cost.gateway_cpu import run_gateway
from loadtests.studies.gateway_cost.own_process import Served, own_process

_SETTLED_S = 12.0
_STRETCHES = 3


def _infos(urls: Sequence[str]) -> list[ReplicaInfo]:
    return [
        ReplicaInfo(
            replica_id=f"engine-{number}", incarnation=str(number), group="engine", kind=EngineKind.SIM, url=url,
            model="sim", world_size=1, max_model_len=32768, max_num_seqs=256, engine_version="0.26.0",
        )
        for number, url in enumerate(urls)
    ]  # fmt: skip


def _shares(gateway: Served, seconds: float) -> list[float]:
    """Return the gateway's share of a core in each of three stretches of so many seconds."""
    time.sleep(_SETTLED_S)
    shares = []
    for _ in range(_STRETCHES):
        cpu_s, began = gateway.cpu_s, time.monotonic()
        time.sleep(seconds)
        shares.append((gateway.cpu_s - cpu_s) / (time.monotonic() - began))
    return shares


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.gateway_cost.idle_cpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of the configuration")
    parser.add_argument("--replicas", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each stretch")
    args = parser.parse_args()
    settings = ["engine.kind=sim", f"engine.num_replicas={args.replicas}", "weights.store=null", "gateway.port=0"]
    config = load(None, [*settings, "gateway.ledger=null", *args.settings])
    with (
        own_process(idle_engines.run, args.replicas) as engines,
        own_process(run_gateway, config, _infos(engines.url.split())) as gateway,
    ):
        shares = _shares(gateway, args.seconds)
    print(f"{args.replicas} idle replicas: {', '.join(f'{share:.2%}' for share in sorted(shares))} of a core")
    return 0


if __name__ == "__main__":
    sys.exit(main())
