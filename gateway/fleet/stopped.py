"""Stops a replica before its engine is overwritten, and ends its rollouts in flight."""

import time
from contextlib import suppress

from engines.errors import DeadlineExceeded
from engines.types import PauseMode
from gateway.fleet.brake import Holder
from gateway.fleet.event_wait import is_set_within
from gateway.fleet.replica import Replica

_AGAIN_S = 0.2
_GRACE_S = 5.0
_GIVEN_UP_S = 1.0


async def cut_off(replica: Replica, *, by: Holder, timeout_s: float) -> None:
    """End all rollouts of the replica with the tokens they have; they go on elsewhere. The caller bounds this.

    A request that was on its way when the engine stopped waits there unread. Another pause ends it; where the engine
    does not read it even then, it is dropped after some seconds and retried elsewhere.
    """
    replica.cut_off(is_on=True)
    try:
        await replica.changes.taken()  # before the first reply that the engine ends for this
        grace_ends = time.monotonic() + _GRACE_S
        while True:
            await replica.brake.stop(by, PauseMode.ABORT, clear_cache=False, timeout_s=timeout_s)
            if await is_set_within(replica.idle, _AGAIN_S):
                return
            if time.monotonic() > grace_ends:
                replica.drop_calls()
    finally:
        try:
            if not replica.idle.is_set():  # it was given up: what the engine has ended is no reply of a client's abort
                replica.drop_calls(rollouts_alone=True)
                with suppress(DeadlineExceeded):  # of a worker that does not end
                    await replica.changes.taken()
                await is_set_within(replica.idle, _GIVEN_UP_S)
        finally:
            replica.cut_off(is_on=False)
