"""Access to an engine from another node. Engines listen on loopback, since their weight routes need no key.

The first request of a connection must carry the key as bearer; then bytes are forwarded without parsing. The end of
either side ends the other, so that engines notice cancelled requests.
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
    """Forwards connections from an address of this node to the engine at `engine_url`, if they carry `key`."""

    def __init__(self, engine_url: str) -> None:
        self.key = secrets.token_hex(32)
        parts = urlsplit(engine_url)
        self._host, self._port = parts.hostname, parts.port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self, host: str) -> str:
        """Listen on a free port of `host`; return the URL that is forwarded."""
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
            pass  # one side has gone; the other's connection ends
        finally:
            writer.close()

    def _opens(self, head: bytes) -> bool:
        fields = (line.partition(b":") for line in head.split(b"\r\n")[1:])
        keys = (value.strip() for name, _, value in fields if name.strip().lower() == b"authorization")
        return hmac.compare_digest(next(keys, b""), f"Bearer {self.key}".encode())

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
            # The engine is gone. Stop listening too, so that the gateway sees a dead engine and not a slow one.
            if self._server is not None:
                self._server.close()
            raise


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while block := await reader.read(_BLOCK_BYTES):
        writer.write(block)
        await writer.drain()
