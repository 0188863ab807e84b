"""Notices the loss of a client's host, which sends no end of its connections itself."""

import socket

from aiohttp import web

LEASE_PATH = "/v1/weight_lease"
"""The route whose connection has to end with its trainer, and with the trainer's host."""


def notice_lost_host(request: web.Request) -> None:
    """Let the kernel end a connection whose other host has been silent for 4 s; one of this host ends by itself."""
    connection = request.transport.get_extra_info("socket") if request.transport else None
    if connection is None or connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4000)  # while a byte is unacknowledged
