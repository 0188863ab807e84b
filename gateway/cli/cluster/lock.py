"""A lock per application: two commands that change it never run at once."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from engines.errors import RolloutGatewayError
from engines.store.files import try_lock
from gateway.cli.cluster.state import State


class ApplicationBusy(RolloutGatewayError):
    """Another command changes the application."""


@contextmanager
def changing(name: str, verb: str) -> Iterator[None]:
    """Hold the application's lock. Raises `ApplicationBusy` where another process holds it, and names that process."""
    path = State.folder() / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not try_lock(descriptor):
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another command"
            raise ApplicationBusy(
                f"{holder} changes {name} already: wait for it, or end it and run `rollout-gateway down --name {name}`"
            )
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"`rollout-gateway {verb}` (process {os.getpid()})\n".encode())
        yield
    finally:
        os.close(descriptor)
