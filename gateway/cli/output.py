"""Output of the commands: reports as lines, tables and JSON."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gateway.cli.cluster.application import Running

_LABEL_WIDTH = 24
_EVENTS = 10
_COLUMNS = {
    "label": "replica", "state": "state", "weight_version": "version", "samples_in_flight": "samples",
    "restarts": "restarts", "uptime_s": "up, s", "gpu_ids": "GPUs", "model": "model", "reason": "reason",
}  # fmt: skip
"""Those of a terminal's width; --json has all."""


def print_running(found: Running) -> None:
    rows = {
        "application": found.status,
        "rollout URL": found.rollout_url or "unknown: the control plane does not answer",
        "control URL": found.control_url or "off (serve.proxy_location is Disabled)",
        "Ray dashboard": found.dashboard,
        **{f"replicas of {name}": text for name, text in found.replicas.items()},
    }
    if found.message:
        rows["message"] = found.message
    for name, value in rows.items():
        _print_row(name, value)


def describe_update(last: dict[str, Any]) -> str:
    """Return one line: end, transport, seconds by step, bytes and canary results."""
    found = Counter((replica.get("canary") or {}).get("result", "not asked") for replica in last["replicas"].values())
    steps = ", ".join(f"{step} {seconds:.3f}" for step, seconds in last["seconds"].items())
    is_group = last["transport"] not in ("store", "relay")
    return (
        f"version {last['version']} {last['end']} over {last['transport']} in {last['age_s']:.3f} s ({steps}), "
        f"{last['bytes'] / 1e6:.1f} MB, canary: {', '.join(f'{n} {result}' for result, n in found.items()) or 'none'}"
        + (f"; not staged: {last['unstaged']}" if is_group and last["unstaged"] else "")
        + (f"; {last['error']}" if last["error"] else "")
    )


def print_fleet(fleet: dict[str, Any]) -> None:
    _print_row("policy", fleet["policy"] or "none: every model is frozen")
    _print_row("weight version", fleet["weight_version"])
    if reason := fleet["weight_store"]["reason"]:
        _print_row("no weight store", reason)
    if update := fleet["weight_update"]:
        there = sum(replica["weight_version"] == update["version"] for replica in fleet["replicas"])
        step = f"{update['phase']}, {there} replicas hold it, {update['age_s']:.1f} s"
        _print_row("update under way", f"version {update['version']} {step}")
    if last := fleet["last_weight_update"]:
        _print_row("last update", describe_update(last))
    for adapter in fleet["adapters"]:
        held = f"version {adapter['version']}, on {len(adapter['replicas'])} replicas, {adapter['rollouts']} rollouts"
        _print_row("LoRA adapter", f"{adapter['name']}: {held}, from {adapter['path']}")
    for replica_id, reason in fleet["replicas_refused"].items():
        _print_row("refused", f"{replica_id}: {reason}")
    missing = Counter((replica["group"], replica["reason"]) for replica in fleet["replicas_missing"])
    for (group, reason), number in missing.items():
        _print_row("missing", f"{group} x {number}: {reason}")
    if started := [replica for replica in fleet["replicas"] if replica["start"]]:
        last = max(started, key=lambda replica: replica["start"]["began"])
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in last["start"]["phases"].items())
        _print_row("last start", f"{last['label']}, {last['start']['seconds']:.1f} s ({phases})")
    rows = [[_cell(replica, column) for column in _COLUMNS] for replica in fleet["replicas"]]
    _print_table([list(_COLUMNS.values()), *rows])
    print_events(fleet["events"][-_EVENTS:])


def print_events(events: Sequence[dict[str, Any]]) -> None:
    for event in events:
        at = time.strftime("%F %T", time.localtime(event["at"]))
        print(f"{at}  {event['subject']}: {event['text']}")


def _cell(replica: dict[str, Any], column: str) -> str:
    value = replica[column]
    if isinstance(value, list):
        value = ",".join(map(str, value))
    shown = "-" if value in (None, "") else str(value)
    return f"{shown}{' (frozen)' if column == 'model' and replica['frozen'] else ''}"


def _print_row(label: str, value: Any) -> None:
    print(f"{label + ':':<{_LABEL_WIDTH}}{value}")


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
