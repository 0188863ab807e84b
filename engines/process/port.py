"""A loopback port for one server, as long as no other start on this machine may draw it."""

import socket
from contextlib import suppress
from random import SystemRandom

from engines.errors import EngineStartFailed

# Below those that the kernel gives to programs that ask for any, one of which could get it before its user binds it.
_PORTS = range(20_000, 30_000)
_DRAWN = 100


class HeldPort:
    """A loopback port that was free when it was drawn. An engine may bind it minutes later: until `release`, or the end
    of this process, no other `HeldPort` of this machine has the same `number`."""

    def __init__(self) -> None:
        """Raise `EngineStartFailed` where none of a hundred is free."""
        for number in SystemRandom().sample(_PORTS, min(_DRAWN, len(_PORTS))):
            if (lock := _locked(number)) is None:
                continue
            if _is_free(number):
                self.number, self._lock = number, lock
                return
            lock.close()
        raise EngineStartFailed(
            f"none of {_DRAWN} ports from {_PORTS.start} to {_PORTS.stop - 1} is free on this machine"
        )

    def release(self) -> None:
        self._lock.close()


def free_port() -> int:
    """Return a loopback port that is free now. Raise `EngineStartFailed` where none of a hundred is."""
    port = HeldPort()
    port.release()
    return port.number


def _locked(number: int) -> socket.socket | None:
    """Return the lock of a port; None where another has it.

    It is an abstract address of a UNIX socket: as ports, such addresses belong to the network namespace, whatever user
    or temporary folder a process has, and the kernel frees them with their process.
    """
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0rollout-gateway-port-{number}")
    except OSError:
        lock.close()
        return None
    return lock


def _is_free(number: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", number))
        return True
    return False
