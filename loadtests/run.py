"""One run of a scenario: options, and records of all its processes."""

import math
import socket
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import gevent
from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from loadtests.report.series import Measures
from loadtests.workloads import LengthMix

_ROW = "MEASURE"
_SECONDS = "_s"
_CONNECT_S = 5.0


@dataclass(slots=True)
class Run:
    """The records of this process; the master's has those of all processes."""

    environment: Environment
    measures: Measures = field(default_factory=Measures)

    @staticmethod
    def of(environment: Environment) -> "Run":
        run: Run = vars(environment)["rollout_run"]
        return run

    @property
    def settings(self) -> Namespace:
        settings: Namespace | None = self.environment.parsed_options
        assert settings is not None
        return settings

    def record(self, name: str, value: float, at: float | None = None, *, is_beside: bool = False) -> None:
        """Record a value at its time. Seconds also get a row in Locust's tables, outside of its total of requests."""
        self.measures.record(name, value, at, is_beside=is_beside)
        if name.endswith(_SECONDS):
            self.environment.stats.get(name.removesuffix(_SECONDS), _ROW).log(round(1000 * value), 0)

    def share(self) -> None:
        """Send workers' records to the master with Locust's reports."""

        def send(client_id: str, data: dict[str, Any]) -> None:
            data["measures"] = self.measures.take()

        def receive(client_id: str, data: dict[str, Any]) -> None:
            self.measures.add(data["measures"])

        self.environment.events.report_to_master.add_listener(send)
        self.environment.events.worker_report.add_listener(receive)


def checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Return a `type` of an option: the text itself, if `parse` accepts it.

    Text, since Locust sends options to its workers; and at once, since a process that ends later leaves its workers.
    """

    def check(text: str) -> str:
        try:
            parse(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error
        return text

    return check


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--prompt-tokens",
        type=checked(LengthMix.parse),
        default="256",
        help="length of a prompt: 256, or a mix: 128*3,1024*1",
    )
    add(
        "--max-tokens", type=checked(LengthMix.parse), default="256", help="length of a completion, or a mix of lengths"
    )
    add("--model", default="", help="name to ask for; the server's own unless given")
    add("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    add("--request-timeout", type=float, default=1800.0, help="longest wait for a reply, in seconds")
    add("--api-key", default="", env_var="ROLLOUT_GATEWAY_KEY", is_secret=True, help="bearer key")


def positive(text: str) -> float:
    """Parse a number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"{text}: a number above 0 is needed")
    return number


def answering(url: str) -> None:
    """Raise `ValueError` if no connection can be made to `url`."""
    where = urlsplit(url)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise ValueError(f"{url!r}: no server to load: expected http://host:port")
    try:
        port = where.port or (443 if where.scheme == "https" else 80)
        socket.create_connection((where.hostname, port), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise ValueError(f"{url!r}: no server to load: {error}") from error


@events.init_command_line_parser.add_listener
def check_host(parser: LocustArgumentParser) -> None:
    """Have Locust's own --host refused where nothing listens, before processes are forked."""
    for action in parser._actions:
        if action.dest == "host":
            action.type = checked(answering)


@events.init.add_listener
def begin(environment: Environment, **_: Any) -> None:
    run = Run(environment)
    vars(environment)["rollout_run"] = run
    run.share()
    # Imports took their time, and timers count from when the loop last looked at the clock: -t would end early.
    gevent.get_hub().loop.update_now()
