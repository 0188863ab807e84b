"""URLs of sockets that are bound to all addresses of a machine."""

import socket

_ANY = ("0.0.0.0", "::", "")
# Reserved for documentation, so it is nobody's; routing tables have a way there all the same.
_ELSEWHERE = ("192.0.2.1", 9)


def url_of(host: str, port: int) -> str:
    """Return the URL under which others reach a socket bound to `host`; for all addresses, that of the main one."""
    host = _own_address() if host in _ANY else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _own_address() -> str:
    """Return our address on the way to other machines, or the host's name where there is no way there."""
    # A datagram socket that is connected sends nothing yet.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])
