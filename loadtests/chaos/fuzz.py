"""Sends random bad requests to a gateway, and watches that nothing dies, hangs or is harmed.

    python -m loadtests.chaos.fuzz [--requests 20000] [--seed 1] [--json out.json]

Beside the bad requests run good rollouts, the bystanders, of which every token is checked. The last line is
`deaths N, hung N, plain-text 500 N, bystanders harmed N`; the exit status is 1 if a count is not 0. The same seed sends
the same requests.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from engines.config import SimConfig
from loadtests.chaos.clients.bad_requests import ADMIN_KEY, INFERENCE_KEY, BadRequest, bad_requests
from loadtests.chaos.clients.callers import Callers
from loadtests.chaos.clients.tally import Tally
from loadtests.chaos.faults import Newest
from loadtests.chaos.process_fleet import ProcessFleet, fleet_config, healthy_within, running

SIM = SimConfig(decode_step_s=0.001)
_REPLICAS = 2
_AT_ONCE = 16
_BOUND_S = 60.0
_QUEUE_S = 20.0  # a rollout may wait so long for a version that no replica has
_UP_S = 60.0
_SHOWN = 300
_KEPT = 30


@dataclass(slots=True)
class Findings:
    """Counts of a run. `unanswered` connections were closed without a reply; `errors_500` are JSON errors of ours, each
    an unforeseen one. `examples` has requests with what was wrong."""

    requests: int = 0
    deaths: int = 0
    hung: int = 0
    plain_500: int = 0
    errors_500: int = 0
    unanswered: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    bystanders: Tally = field(default_factory=Tally)
    examples: list[str] = field(default_factory=list)

    @property
    def harmed(self) -> int:
        """Return the good rollouts that failed, had to be retried, or came wrong."""
        tally = self.bystanders
        return sum((tally.failed, tally.retried, tally.wrong, tally.stale, tally.duplicated, tally.lost, tally.hung))

    @property
    def is_clean(self) -> bool:
        return not (self.deaths or self.hung or self.plain_500 or self.errors_500 or self.harmed)

    def note(self, request: BadRequest, found: str) -> None:
        if len(self.examples) < _KEPT:
            self.examples.append(f"{found}: {request.what}: {request.content[:_SHOWN]!r}")


async def fuzzed(seed: int, count: int) -> Findings:
    """Run `count` bad requests beside bystanders on a fleet of its own."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        keys = {"inference_keys": [INFERENCE_KEY], "admin_keys": [ADMIN_KEY], "trusted_networks": []}
        config = fleet_config("fuzz", _REPLICAS, SIM, Path(folder), queue_timeout_s=_QUEUE_S, **keys)
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"max_model_len": 512})})
        fleet = ProcessFleet(config, Path(folder))
        async with running(fleet):
            await healthy_within(fleet.url, _UP_S)
            return await _run(fleet, bad_requests(seed, count))


async def _run(fleet: ProcessFleet, requests: Sequence[BadRequest]) -> Findings:
    bystanders = Callers(fleet.url, SIM, Newest(), tokens=48, bound_s=_BOUND_S, key=INFERENCE_KEY)
    findings, left = Findings(), iter(requests)
    try:
        bystanders.start(1)
        await asyncio.gather(*(_send_all(fleet.url, left, findings) for _ in range(_AT_ONCE)))
        findings.bystanders = (await bystanders.stop()).tally
    finally:
        await bystanders.close()
    findings.deaths = fleet.deaths
    return findings


async def _send_all(url: str, requests: Any, findings: Findings) -> None:
    where = urlsplit(url)
    for request in requests:
        findings.requests += 1
        try:
            async with asyncio.timeout(_BOUND_S):
                reply = await _exchange(str(where.hostname), where.port or 0, request)
        except TimeoutError:
            findings.hung += 1
            findings.note(request, "hung")
            continue
        _judge(request, reply, findings)


async def _exchange(host: str, port: int, request: BadRequest) -> bytes:
    """Return all that the gateway answers until it closes. Our side closes after an incomplete request."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request.content)
        await writer.drain()
        if not request.is_complete and writer.can_write_eof():
            writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


def _judge(request: BadRequest, reply: bytes, findings: Findings) -> None:
    head, _, body = reply.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        findings.unanswered += 1
        if request.is_complete:
            findings.note(request, "unanswered")
        return
    status = int(words[1])
    findings.statuses[status] += 1
    if status != 500:
        return
    is_json = b"application/json" in head.lower()
    findings.errors_500 += is_json
    findings.plain_500 += not is_json
    findings.note(request, f"{status} {body[:_SHOWN]!r}")


def _report(findings: Findings, seed: int, seconds: float) -> dict[str, Any]:
    counts = ("requests", "deaths", "hung", "plain_500", "errors_500", "unanswered", "examples")
    return {
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seed": seed,
        "seconds": round(seconds, 1),
        **{name: getattr(findings, name) for name in counts},
        "statuses": {str(status): count for status, count in sorted(findings.statuses.items())},
        "bystanders": findings.bystanders.submitted,
        "bystanders_harmed": findings.harmed,
        "bystanders_reasons": findings.bystanders.reasons,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.chaos.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all findings")
    args = parser.parse_args(argv)
    began = time.monotonic()
    findings = asyncio.run(fuzzed(args.seed, args.requests))
    report = _report(findings, args.seed, time.monotonic() - began)
    if args.json:
        args.json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    for example in (*findings.examples, *findings.bystanders.reasons):
        print("   ", example)
    print(
        {name: report[name] for name in ("requests", "seconds", "statuses", "unanswered", "errors_500", "bystanders")}
    )
    print(
        f"deaths {findings.deaths}, hung {findings.hung}, plain-text 500 {findings.plain_500}, "
        f"bystanders harmed {findings.harmed}"
    )
    return 0 if findings.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
