"""Groups of sessions for a trainer without an event loop, on the thread of its client."""

from typing import Any

from trainer_client.blocking import BlockingRolloutClient, _Blocking, _each
from trainer_client.sessions.groups import SessionGroups


class BlockingSessionGroups(_Blocking[SessionGroups[Any]]):
    """`SessionGroups` as a blocking iterator with the same arguments. `run` is a coroutine function, and it and `tasks`
    run on the client's thread."""

    def __init__(self, client: BlockingRolloutClient, *args: Any, **kwargs: Any) -> None:
        super().__init__(SessionGroups(client._inner, *args, **kwargs), client._thread)

    __iter__ = _each(SessionGroups.__aiter__)
