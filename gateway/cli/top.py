"""`rollout-gateway top`: the dashboard in a terminal, drawn from the same JSON."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from engines.engine import Json
from gateway.cli.output import plain_table
from gateway.cli.rollout_url import ask

_EVERY_S = 1.0
_PATH = "/dashboard.json"
_SPARKS = " ▁▂▃▄▅▆▇█"
_WIDTH = 60
_EVENTS = 8
_STYLES = {"SERVING": "green", "UPDATING": "yellow", "SYNCING": "blue", "DRAINING": "magenta"}


def top(console: Console, url: str, key: str, *, once: bool = False) -> None:
    """Draw the fleet each second until Ctrl-C; once for a pipe."""
    if once or not console.is_terminal:
        console.print(drawn(ask(url, _PATH, key)))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(drawn(ask(url, _PATH, key)), refresh=True)
            time.sleep(_EVERY_S)


def drawn(data: Json) -> Group:
    """Lay the dashboard's JSON out as lines and tables."""
    return Group(_head(data), Text(), _series(data), Text(), _replicas(data), Text(), *_updates(data), *_events(data))


def _head(data: Json) -> Text:
    status, update = data["status"], data["status"]["weight_update"]
    serving = sum(replica["state"] == "SERVING" for replica in status["replicas"])
    words = [
        f"{status['policy'] or 'all models frozen'}",
        "ready" if status["ready"] else "not complete",
        f"{serving} of {status['replicas_expected']} replicas serve",
        f"weight version {status['weight_version']}",
    ]
    words += [f"updating to {update['version']}: {update['phase']}"] if update else []
    words += [f"batch of {data['batch']['age_s']:.0f} s, {data['batch']['done']} done"] if data["batch"] else []
    return Text("  ·  ".join(words), style="bold")


def _series(data: Json) -> Table:
    table = plain_table("", "now", f"last {_WIDTH} looks")
    for name, key in (("tokens/s", "tokens_per_s"), ("samples in flight", "in_flight"), ("rollouts waiting", "queue")):
        values = data["series"][key]
        table.add_row(name, f"{values[-1]:,.0f}" if values else "-", sparkline(values[-_WIDTH:]))
    return table


def sparkline(values: Sequence[float]) -> str:
    """Draw values as blocks of eight heights, the highest as a full one."""
    highest = max(values, default=0.0)
    steps = len(_SPARKS) - 1
    return "".join(_SPARKS[round(value / highest * steps)] if highest else _SPARKS[0] for value in values)


def _replicas(data: Json) -> Table:
    table = plain_table(
        "replica", "state", "version", "KV", "running", "waiting", "tokens/s", "up", "restarts", "process", "reason"
    )
    for replica in sorted(data["status"]["replicas"], key=lambda row: str(row["label"])):
        load = data["engines"].get(replica["replica_id"], {})
        table.add_row(
            replica["label"],
            Text(replica["state"], style=_STYLES.get(replica["state"], "red")),
            _shown(replica["weight_version"], str),
            _shown(load.get("kv_usage"), lambda share: f"{share:.0%}"),
            _shown(load.get("running"), str),
            _shown(load.get("waiting"), str),
            _shown(load.get("tokens_per_s"), lambda rate: f"{rate:,.0f}"),
            _shown(replica["uptime_s"], lambda seconds: f"{seconds:,.0f} s"),
            str(replica["restarts"]),
            str(replica["pid"] or "-"),
            replica["reason"],
        )
    for missing in data["status"]["replicas_missing"]:
        table.add_row(missing["group"], Text("MISSING", style="red"), *["-"] * 8, missing["reason"])
    return table


def _updates(data: Json) -> list[Text]:
    if not data["updates"]:
        return []
    last = data["updates"][0]
    reason = f": {last['error']}" if last["error"] else ""
    return [Text(f"last update: version {last['version']} {last['end']} in {last['age_s']:.2f} s{reason}"), Text()]


def _events(data: Json) -> list[Text]:
    return [
        Text(f"{time.strftime('%T', time.localtime(event['at']))}  {event['subject']}: {event['text']}", style="dim")
        for event in reversed(data["status"]["events"][-_EVENTS:])
    ]


def _shown(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)
