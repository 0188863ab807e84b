"""The wait of an engine's worker for its trainer's listener, before a rendezvous that no other thread can end."""

import math
import socket
import time

LISTENS_S = 20.0
"""Longest wait for the listener. Our trainers open it before they have engines called; TRL opens it beside its call. A
trainer that has died never listens, and an engine makes no token while it waits."""
_LOOK_S = 0.05


def until_listening(address: str, port: int, timeout_s: float = math.inf) -> None:
    """Return once the trainer listens. Raise `RuntimeError` after `LISTENS_S`, or `timeout_s` if that is shorter."""
    limit_s = min(timeout_s, LISTENS_S)
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return socket.create_connection((address, port), limit_s).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the trainer does not listen at {address}:{port} ({error}): it has died, or is out of reach"
                ) from error
        time.sleep(_LOOK_S)
