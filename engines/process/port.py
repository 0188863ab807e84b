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
    of this process, no other `HeldPort` of this machine has the same `number`.

    Its lock is an abstract address of a UNIX socket: as ports, such addresses belong to the network namespace, whatever
    user or temporary folder a process has, and the kernel frees them with their process.
    """

    def __init__(self) -> None:
        """Raise `EngineStartFailed` where none of a hundred is free."""
        for self.number in SystemRandom().sample(_PORTS, min(_DRAWN, len(_PORTS))):
            self._lock = socket.socket(socket.AF_UNIX)
            with suppress(OSError), socket.socket() as probe:
                self._lock.bind(f"\0rollout-gateway-port-{self.number}")
                probe.bind(("127.0.0.1", self.number))
                return
            self._lock.close()
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
