"""A client that is slow with its body or its reply, or speaks no HTTP/1.1, holds nothing for ever."""

import asyncio
import socket

import orjson
import pytest
from structlog.testing import capture_logs

from gateway.http import json_body, listener
from tests.rigs.rig import Rig, StartRig

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": [5], "max_tokens": 2}'
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
SOON_S = 60.0


async def reply_to(rig: Rig, sent: bytes) -> bytes:
    """All that comes back on a connection that sends this, and then nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rpartition(":")[2]))
    writer.write(sent)
    try:
        async with asyncio.timeout(SOON_S):
            return await reader.read()
    finally:
        writer.close()


async def test_a_body_that_stops_is_an_error_and_closes_its_connection(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_body, "_QUIET_TIMEOUT_S", 0.2)
    reply = await reply_to(rig, WHOLE[:-5])
    assert reply.startswith(b"HTTP/1.1 400")
    assert b"no part of it came for 0.2 s" in reply


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"POST / HTTP/1.1\r\nA B\r\n\r\n",
        b"GET /status HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer hunter2\x0b\r\n\r\n",
        b"GET /status HTTP/1.1\r\nHost: a\r\nAuthorization : Bearer hunter2\r\n\r\n",
        b"GET /status HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer hunter2" + b"x" * 20_000 + b"\r\n\r\n",
        b"GET /status?key=hunter2 HTTP/9.1\r\n\r\n",
    ],
    ids=["TLS", "no colon", "control", "space", "long", "version"],
)
async def test_a_head_that_cannot_be_read_is_answered_in_json_and_the_log_has_nothing_of_it(
    rig: Rig, caplog: pytest.LogCaptureFixture, head: bytes
) -> None:
    with capture_logs() as logged:
        reply = await reply_to(rig, head)
    assert b" 400 Bad Request" in reply.partition(b"\r\n")[0]
    assert b"application/json" in reply
    assert b"cannot be read" in reply
    assert [line["event"] for line in logged] == ["a request cannot be read"]
    assert "hunter2" not in repr(logged)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_reads_nothing_of_its_reply_is_cut_off(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(listener, "UNREAD_TIMEOUT_S", 0.2)
    rig = await start_rig(1)
    asked = {"prompt": [[5]] * 300, "max_tokens": 100, "ignore_eos": True, "logprobs": 5, "return_token_ids": True}
    body, loop = orjson.dumps(asked | {"stream": stream}), asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", int(rig.url.rpartition(":")[2])))
        async with asyncio.timeout(SOON_S):
            await loop.sock_sendall(client, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            while not rig.fleet.replicas[0].placed or rig.num_connections:
                await asyncio.sleep(0.01)
