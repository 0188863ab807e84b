"""The time from kill -9 of an engine, or SIGSTOP, to the first tokens of its successor, in parts.

    python -m loadtests.studies.recovery --url http://127.0.0.1:8100 [--times 3] [--json out.json]

The fleet was started on this machine by `rollout-gateway up`. The parts of the start are its phases, and the last part
ends with a completion of the successor, which holds the fleet's version by then.
"""

import argparse
import json
import os
import signal
import statistics
import time
import urllib.request
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil

Json = dict[str, Any]

_POLL_S = 0.02
_TIMEOUT_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study. The exit status is 1 if a replica did not recover, or has other weights than the fleet."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.studies.recovery", description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="the gateway's URL")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--signal", choices=["KILL", "STOP"], default="KILL", help="what the engine gets")
    parser.add_argument("--apart-s", type=float, default=25.0, help="time from a recovery to the next kill")
    parser.add_argument("--limit-s", type=float, default=600.0, help="limit on a recovery")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    recoveries = []
    for _ in range(args.times):
        time.sleep(args.apart_s)
        recoveries.append(recovery(args.url, args.limit_s, signal.Signals[f"SIG{args.signal}"]))
        print(line(recoveries[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(recoveries, indent=2))
    served = [one["answered"] for one in recoveries if "answered" in one]
    if served:
        print(f"{len(served)} of {args.times} answered, in the middle after {statistics.median(served):.2f} s")
    return int(len(served) < args.times)


def recovery(url: str, limit_s: float, hurt: signal.Signals) -> dict[str, float]:
    """Hurt the engine of the first replica that serves; return the second in which each part ended, in order, and
    `cpu`: CPU seconds of the successor's processes."""
    status = _ask(f"{url}/status")
    victim = next(one for one in status["replicas"] if one["state"] == "SERVING")
    known = {one["pid"] for one in status["replicas"]}
    parts: dict[str, float] = {}
    hurt_at, began = time.time(), time.monotonic()
    os.kill(victim["pid"], hurt)
    while (now := time.monotonic() - began) < limit_s:
        replicas = _ask(f"{url}/status")["replicas"]
        if not any(one["pid"] == victim["pid"] and one["state"] == "SERVING" for one in replicas):
            parts.setdefault("noticed", now)
        new = [one for one in replicas if one["pid"] not in known]
        if new and "joined" not in parts:
            parts |= _phases(new[0]["start"], hurt_at) | {"joined": now}
        if new and new[0]["state"] == "SERVING" and new[0]["weight_version"] == status["weight_version"]:
            parts["serving"] = now
            _complete_on(new[0])
            parts["answered"] = time.monotonic() - began
            parts["cpu"] = _cpu_s(new[0]["pid"])
            break
        time.sleep(_POLL_S)
    return parts


def _phases(start: Json, since: float) -> dict[str, float]:
    """Return the second after `since` in which each phase of a start ended."""
    _, *ends = accumulate(start["phases"].values(), initial=start["began"] - since)
    return dict(zip(start["phases"], ends, strict=True))


def line(parts: dict[str, float]) -> str:
    """Return the parts as text, each with its own seconds."""
    last, words = 0.0, []
    for name, ended in parts.items():
        if name == "cpu":
            words.append(f"{ended:.2f} CPU seconds")
        else:
            words.append(f"{name} {ended:.2f} (+{ended - last:.2f})")
            last = ended
    return ", ".join(words)


def _ask(url: str, body: Json | None = None) -> Json:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
        found: Json = json.load(reply)
    return found


def _complete_on(replica: Json) -> None:
    _ask(f"{replica['url']}/v1/completions", {"model": replica["model"], "prompt": [3, 4, 5], "max_tokens": 2})


def _cpu_s(pid: int) -> float:
    engine = psutil.Process(pid)
    times = [process.cpu_times() for process in (engine, *engine.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


if __name__ == "__main__":
    raise SystemExit(main())
