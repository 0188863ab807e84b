"""What stands before the handlers of routes: who may call them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Guards:
    """Each makes of a handler one that refuses whom it is not for."""

    for_inference: Callable[[Handler], Handler]
    for_admin: Callable[..., Handler]
