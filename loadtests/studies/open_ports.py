"""The listening ports of a running fleet of simulated engines on Ray Serve, for SECURITY.md.

    python -m loadtests.studies.open_ports

Starts the fleet twice, on loopback without keys and on all addresses with keys, and prints a table of each: process,
address, ports, and the answer to `GET /status` without a key from this machine's other address. Reads /proc; sends
nothing to other machines.
"""

import http.client
import os
import secrets
import socket
import struct
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from rich.console import Console

from engines.process.port import free_port
from gateway.cli.cluster.progress import shown
from gateway.cli.down import down
from gateway.cli.up import up
from gateway.config.addresses import own_address
from gateway.config.load import load

NAME = "rollout-gateway-ports"
MARK = "OPEN_PORTS_STUDY"
KEYS = [
    "gateway.host=0.0.0.0",
    f'gateway.inference_keys=["{secrets.token_hex(8)}"]',
    f'gateway.admin_keys=["{secrets.token_hex(8)}"]',
]

_LISTENS = "0A"
_TIMEOUT_S = 2.0
_EPHEMERAL = 10_000
_SHOWN = ("gcs_server", "raylet", "dashboard", "monitor.py", "ray.util.client", "sim.server", "ray::")


@dataclass(frozen=True, slots=True)
class Port:
    """A listening TCP socket."""

    process: str
    address: IPv4Address | IPv6Address
    number: int


def listening_ports(mark: str) -> list[Port]:
    """Return the TCP ports on which processes listen that carry the variable `mark` in their environment."""
    sockets = dict(_listening_sockets())
    return [
        Port(_name(folder), *sockets[inode])
        for folder in _marked(mark)
        for inode in sorted(_inodes(folder))
        if inode in sockets
    ]


def _listening_sockets() -> Iterator[tuple[int, tuple[IPv4Address | IPv6Address, int]]]:
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                address, _, port = fields[1].partition(":")
                yield int(fields[9]), (_address(address), int(port, 16))


def _address(text: str) -> IPv4Address | IPv6Address:
    """Read an address of /proc/net/tcp: words of 32 bits in the machine's byte order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    found = ip_address(struct.pack(f"={len(words)}I", *words))
    return found.ipv4_mapped or found if isinstance(found, IPv6Address) else found


def _inodes(process: Path) -> set[int]:
    """Return the inodes of a process's sockets; a forked child that shares them counts too."""
    found = set()
    try:
        for file in (process / "fd").iterdir():
            target = os.readlink(file)
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    except OSError:  # the process has ended, or is another user's
        return set()
    return found


def _marked(mark: str) -> list[Path]:
    """Return the processes with the mark, and their descendants: a process with a long title has lost its variables."""
    parents = {folder: _parent(folder) for folder in Path("/proc").iterdir() if folder.name.isdecimal()}
    found = {folder for folder in parents if _is_marked(folder, mark)}
    while more := {folder for folder, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def _parent(process: Path) -> Path | None:
    try:
        return process.with_name((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _is_marked(process: Path, mark: str) -> bool:
    try:
        return f"{mark}=".encode() in (process / "environ").read_bytes()
    except OSError:
        return False


def _name(process: Path) -> str:
    words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return next((name if name != "ray::" else words for name in _SHOWN if name in words), words[:60])


def answer_from(address: str, port: int) -> str:
    """Return the answer to `GET /status` without a key: the HTTP status, or why there is none."""
    connection = http.client.HTTPConnection(address, port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/status")
        return f"HTTP {connection.getresponse().status}"
    except ConnectionRefusedError:
        return "closed"
    except (OSError, http.client.HTTPException):
        return "open, no HTTP"
    finally:
        connection.close()


def table(ports: list[Port], outside: str) -> str:
    """Return a table in Markdown, a row for each process and address. Ports above 10,000 are drawn at each start."""
    rows: dict[tuple[str, str], set[int]] = defaultdict(set)
    for port in ports:
        rows[port.process, str(port.address)].add(port.number)
    lines = ["| process | address | ports | from another address, without a key |", "| --- | --- | --- | --- |"]
    for (process, address), numbers in sorted(rows.items()):
        answers = sorted({answer_from(outside, number) for number in numbers})
        lines.append(f"| {process} | {address} | {_shown(numbers)} | {', '.join(answers)} |")
    return "\n".join(lines)


def _shown(numbers: set[int]) -> str:
    fixed = [str(number) for number in sorted(numbers) if number < _EPHEMERAL]
    drawn = len(numbers) - len(fixed)
    return ", ".join([*fixed, *([f"{drawn} drawn at the start"] if drawn else [])])


@contextmanager
def _fleet(overrides: list[str], console: Console) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="open-ports-") as logs:
        words = [f"name={NAME}", f"gateway.port={free_port()}", f"serve.http_port={free_port()}", *overrides]
        config = load(Path("examples/sim.yaml"), [*words, "engine.num_replicas=2", f"engine.log_dir={logs}"])
        try:
            with shown(console) as report:
                yield up(config, report).rollout_url
        finally:
            with shown(console) as report:
                down(config.name, report)


def main() -> None:
    console = Console(stderr=True)
    os.environ[MARK] = "1"
    outside = own_address("192.0.2.1", 9)
    for title, overrides in (("On loopback, without keys", []), ("On all addresses, with keys", KEYS)):
        with _fleet(overrides, console) as url:
            print(f"### {title}\n\nRollout URL {url}, probed from {socket.gethostname()} as {outside}.\n")
            print(table(listening_ports(MARK), outside), flush=True)
            print()


if __name__ == "__main__":
    main()
