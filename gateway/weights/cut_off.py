"""Ends what runs on a replica that is about to be overwritten, with the tokens it has: `in_flight: abort`.

What becomes of it then is told in `wire/resumption.py`.
"""

import asyncio
import time

from engines.types import PauseMode
from gateway.fleet.replica import Replica

_AGAIN_S = 0.2
_GRACE_S = 5.0


async def cut_off(replica: Replica, timeout_s: float) -> None:
    """Returns when nothing is in flight on the replica, whose engine is paused from then on; bounded by the caller.

    A request that was on its way when the engine stopped waits there unread: it is ended with another call, or, where
    the engine does not look at those either, left behind after some seconds and begun again elsewhere.
    """
    replica.cuts_off = True
    try:
        grace_ends = time.monotonic() + _GRACE_S
        while True:
            await replica.engine.pause(PauseMode.ABORT, clear_cache=False, timeout_s=timeout_s)
            if await _is_idle(replica):
                return
            if time.monotonic() > grace_ends:
                replica.drop_calls()
    finally:
        replica.cuts_off = False


async def _is_idle(replica: Replica) -> bool:
    try:
        async with asyncio.timeout(_AGAIN_S):
            await replica.idle.wait()
    except TimeoutError:
        return False
    return True
