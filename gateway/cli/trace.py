"""`rollout-gateway trace`: the life of a request's rollouts, a line for each event."""

import time
from collections.abc import Iterator
from urllib.parse import quote

from engines.engine import Json
from gateway.cli.rollout_url import ask

_CAUSES = {
    "gate": "the gate: an update or a pause",
    "replica": "a replica that serves",
    "version": "weights as new as demanded",
    "room": "room on a replica",
    "kv": "KV that other sessions hold",
}


def trace(url: str, key: str, request_id: str) -> Json:
    """Return the gateway's record of a request."""
    return ask(url, f"/traces/{quote(request_id, safe='')}", key)


def trace_lines(found: Json) -> Iterator[str]:
    """Lay a record out as lines: a head for each rollout, then its attempts in order."""
    for rollout in found["rollouts"]:
        yield _head(rollout)
        for number, attempt in enumerate(rollout["attempts"], 1):
            yield from _attempt(number, attempt)


def _head(rollout: Json) -> str:
    words = [f"{rollout['samples']} samples of {rollout['model']}"]
    words += [f"adapter {rollout['adapter']}"] if rollout["adapter"] else []
    words += [f"session {rollout['session']}"] if rollout["session"] else []
    words += ["rest of a rollout that was cut off"] if rollout["goes_on"] else []
    words += [f"trace {rollout['traceparent'].split('-')[1]}"] if rollout["traceparent"] else []
    return f"{rollout['rollout']}: {', '.join(words)}"


def _attempt(number: int, attempt: Json) -> Iterator[str]:
    yield f"  {_clock(attempt['queued'])}  attempt {number} waits for a replica"
    if attempt["placed"] is not None:
        waited = attempt["placed"] - attempt["queued"]
        version = _version(attempt["weight_versions"][0])
        where = f"on {attempt['replica']}, {version}, after {waited:.3f} s: {attempt['why']}"
        yield f"  {_clock(attempt['placed'])}  {where}"
    for cause, seconds in attempt["waited_s"].items():
        yield f"                waited {seconds:.3f} s for {_CAUSES[cause]}"
    if attempt["ended"] is None:
        yield "  it goes on"
        return
    ran = attempt["ended"] - (attempt["placed"] or attempt["queued"])
    at_end = f", {_version(attempt['weight_versions'][-1])}" if attempt["weight_versions"] else ""
    reason = f": {attempt['error']}" if attempt["error"] else ""
    yield f"  {_clock(attempt['ended'])}  {attempt['end']} after {ran:.3f} s{at_end}{reason}"


def _version(version: int | None) -> str:
    return "weights being updated" if version is None else f"weight version {version}"


def _clock(at: float) -> str:
    return f"{time.strftime('%T', time.localtime(at))}.{int(at % 1 * 1000):03d}"
