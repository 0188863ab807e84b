"""The Serve replica of a server that somebody else runs, on a real Ray cluster: what is read there, and by whom."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.chunks import Chunk
from engines.errors import EngineUnreachable
from engines.reading.link import Link
from engines.types import ReplicaInfo
from tests.rigs.openai_server import OpenAiServer
from tests.rigs.ray_app import App, deployed_alone

pytest.importorskip("ray")

pytestmark = pytest.mark.ray

KEY = "secret"
BODY = {"model": "gpt", "prompt": "hello", "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[OpenAiServer]:
    """A server that asks for a key, on a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = OpenAiServer([], KEY)
    asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    yield server
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def app(server: OpenAiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    key: Path = tmp_path_factory.mktemp("key") / "key"
    key.write_text(KEY)
    engine = {"kind": "external", "url": server.url, "model": "gpt", "api_key": f"file:{key}", "num_cpus": 0.1}
    with deployed_alone(engine, num_cpus=1) as running:
        yield running


async def described_to(node: str) -> ReplicaInfo:
    """The replica as a gateway on this node gets it."""
    from ray import serve

    info: ReplicaInfo = await serve.get_deployment_handle("engine", "test").describe.remote(node)
    return info


async def texts(info: ReplicaInfo, key: str) -> list[str | None]:
    """The texts of a reply that is asked of the replica's reader."""
    link, chunks = Link(info.replica_id, info.reader, key), list[Chunk]()
    try:
        await link.read("/v1/completions", BODY, 30, chunks.extend, is_whole=True, streams=False)
    finally:
        await link.close()
    return [choice.text for chunk in chunks for choice in chunk.choices]


@pytest.mark.parametrize("n", [1, 2])
def test_a_server_of_others_is_read_with_its_key(app: App, server: OpenAiServer, n: int) -> None:
    reply = app.ask(app.url + "/v1/completions", BODY | {"n": n})
    assert [(choice["text"], choice["finish_reason"]) for choice in reply["choices"]] == [("echo", "stop")] * n
    assert server.headers[-1]["Authorization"] == f"Bearer {KEY}"
    assert server.bodies[-1]["prompt"] == "hello"


async def test_a_gateway_on_its_node_gets_a_port_of_loopback_and_another_one_of_the_network(
    app: App, server: OpenAiServer
) -> None:
    import ray

    (here,) = (node["NodeID"] for node in ray.nodes())
    near, far = await described_to(here), await described_to("another node")
    assert near.reader.startswith("127.0.0.1:")
    assert far.reader.startswith(f"{ray.util.get_node_ip_address()}:")
    for info in (near, far):
        assert await texts(info, info.reader_key) == ["echo"]
        with pytest.raises(EngineUnreachable, match="connection to its reader broke"):
            await texts(info, "another key")
    assert (far.url, await described_to("another node")) == (server.url, far), "the port is opened once"
