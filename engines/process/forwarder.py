"""The way to an engine of another node: engines listen on loopback, since their weight routes know no key.

The first request of a connection must carry the key as bearer; from then on bytes go both ways as they are, so that
a token costs no parsing here. Whoever ends a connection ends it on both sides: that is how engines are told to stop.
"""

import asyncio
import hmac
import secrets
from urllib.parse import urlsplit

import structlog

log = structlog.get_logger()

_HEAD_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_BLOCK_BYTES = 1 << 18
_REFUSED = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Forwarder:
    """Carries connections from an address of this node to the engine at `engine_url`, for who has `key` alone."""

    def __init__(self, engine_url: str) -> None:
        self.key = secrets.token_hex(32)
        parts = urlsplit(engine_url)
        self._host, self._port = parts.hostname, parts.port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self, host: str) -> str:
        """Listen on a free port of `host`; the URL that is forwarded from now on."""
        self._server = server = await asyncio.start_server(self._accept, host, 0, limit=_BLOCK_BYTES)
        port = server.sockets[0].getsockname()[1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._carry(reader, writer), name="forward")
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            if self._opens(head):
                await self._splice(head, reader, writer)
            else:
                log.warning("forwarder: missing or wrong key", peer=writer.get_extra_info("peername"))
                writer.write(_REFUSED)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # one side is gone; the other sees its connection end
        finally:
            writer.close()

    def _opens(self, head: bytes) -> bool:
        fields = (line.partition(b":") for line in head.split(b"\r\n")[1:])
        told = (value.strip() for name, _, value in fields if name.strip().lower() == b"authorization")
        return hmac.compare_digest(next(told, b""), f"Bearer {self.key}".encode())

    async def _splice(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await self._engine()
        try:
            engine_writer.write(head)
            ways = [
                asyncio.ensure_future(_pump(reader, engine_writer)),
                asyncio.ensure_future(_pump(engine_reader, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            engine_writer.close()

    async def _engine(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                return await asyncio.open_connection(self._host, self._port, limit=_BLOCK_BYTES)
        except ConnectionRefusedError:
            # Nobody listens there any more. Nor do we then, by which the gateway tells a dead engine from a slow one.
            if self._server is not None:
                self._server.close()
            raise


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while block := await reader.read(_BLOCK_BYTES):
        writer.write(block)
        await writer.drain()
