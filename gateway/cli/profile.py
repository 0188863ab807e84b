"""`rollout-gateway profile`: an archive of what the engines' profilers record while they serve."""

import tarfile
from collections.abc import Sequence
from pathlib import Path

from gateway.cli.rollout_url import download

_WRITING_S = 900.0
"""Longest wait for the profilers to write their files."""


def profile(url: str, key: str, seconds: float, replicas: Sequence[str], out: Path) -> list[str]:
    """Record engines for some seconds; return the names in the archive `out`. Without `replicas` all that serve."""
    body = {"seconds": seconds} | ({"replicas": list(replicas)} if replicas else {})
    download(url, "/profile", key, body, out, seconds + _WRITING_S)
    with tarfile.open(out) as archive:
        return archive.getnames()
