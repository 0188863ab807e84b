"""The changes of replicas and of the fleet's versions, told to those who keep copies of them in other processes."""

import asyncio
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gateway.fleet.replica import Replica

Argument = str | int | bool | None


class Follower(Protocol):
    """Keeps copies of all replicas."""

    def joined(self, replica: "Replica") -> None:
        """Begin a copy of a replica as it is now."""

    def left(self, replica: "Replica") -> None:
        """End the copy of a replica, which is LOST."""

    def changed(self, replica: "Replica", change: str, arguments: tuple[Argument, ...]) -> None:
        """Make the change, a method of `Replica`, on the copy too."""

    def versions(self) -> None:
        """Take over the fleet's versions as they are now."""

    async def taken(self) -> None:
        """Return once all that was told so far is done, or the copies are gone. Takes a bounded time."""


class Changes:
    """Tells all followers, in order and at once."""

    def __init__(self) -> None:
        self._followers: list[Follower] = []

    def follow(self, follower: Follower) -> None:
        self._followers.append(follower)

    def unfollow(self, follower: Follower) -> None:
        self._followers.remove(follower)

    def joined(self, replica: "Replica") -> None:
        for follower in self._followers:
            follower.joined(replica)

    def left(self, replica: "Replica") -> None:
        for follower in self._followers:
            follower.left(replica)

    def changed(self, replica: "Replica", change: str, *arguments: Argument) -> None:
        for follower in self._followers:
            follower.changed(replica, change, arguments)

    def versions(self) -> None:
        for follower in self._followers:
            follower.versions()

    async def taken(self) -> None:
        """Return once every follower has done what was told so far. An engine is touched after this, never before."""
        if self._followers:
            await asyncio.gather(*(follower.taken() for follower in self._followers))
