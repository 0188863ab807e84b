"""Many idle engines in one process: each has a port of its own, and answers probes as a real one does, at next to no
cost."""

import asyncio
from multiprocessing.connection import Connection
from typing import cast

import uvloop

from loadtests.studies.gateway_cost.own_process import until_closed

# A histogram of vLLM's page has so many lines, and its page so many histograms, each for one copy of the model.
_EDGES, _HISTOGRAMS = 20, 25
_LABELS = '{engine="0",model_name="sim"'


def _response(body: bytes, kind: str) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\ncontent-type: {kind}\r\nserver: uvicorn\r\n\r\n"
    return head.encode() + body


def _page() -> bytes:
    """Return a page of vLLM's size and form."""
    lines = [
        f"vllm:{name}{_LABELS}}} {value}"
        for name, value in (
            ("num_requests_running", 0.0),
            ("num_requests_waiting", 0.0),
            ("kv_cache_usage_perc", 0.0),
            ("prompt_tokens_total", 1.2345e7),
            ("generation_tokens_total", 6.789e6),
        )
    ]
    lines.append('vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="10000"} 1.0')
    for number in range(_HISTOGRAMS):
        name = f"vllm:request_figure_{number}" if number else "vllm:request_generation_tokens"
        lines += [f"# HELP {name} A histogram.", f"# TYPE {name} histogram"]
        lines += [f'{name}_bucket{_LABELS},le="{float(2**edge)}"}} 100.0' for edge in range(_EDGES)]
        lines += [f'{name}_bucket{_LABELS},le="+Inf"}} 100.0', f"{name}_count{_LABELS}}} 100.0"]
    return "\n".join([*lines, ""]).encode()


_ANSWERS = {
    b"GET /health": _response(b"", "text/plain"),
    b"GET /metrics": _response(_page(), "text/plain; version=0.0.4"),
    b"GET /weight_info": _response(b'{"weight_version":"0"}', "application/json"),
}
_OTHERS = _response(b"{}", "application/json")


class _Connection(asyncio.Protocol):
    """One kept connection; the requests of probes come whole."""

    _transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(_ANSWERS.get(data.partition(b" HTTP")[0], _OTHERS))


async def _serve(number: int, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(_Connection, "127.0.0.1", 0) for _ in range(number)]
    pipe.send(" ".join(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers))
    await until_closed(pipe)


def run(number: int, pipe: Connection) -> None:
    """Serve in this process until the pipe closes; sends all URLs, with blanks between."""
    uvloop.run(_serve(number, pipe))
