"""Blocking requests of commands, which carry keys: to the address that was named, and to no other."""

import urllib.request
from typing import Any


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Leaves a redirection as the error that it then is: urllib would send the key along, to any host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def opener() -> urllib.request.OpenerDirector:
    """Return an opener without the environment's proxy: both ends are inside the cluster's network."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
