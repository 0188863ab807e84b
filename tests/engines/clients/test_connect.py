"""Each kind of engine is talked to in its own words."""

import pytest

from engines.clients.connect import connect
from engines.clients.sglang_engine import SglangEngine
from engines.clients.vllm_engine import VllmEngine
from engines.types import EngineKind


@pytest.mark.parametrize(
    ("kind", "client"),
    [(EngineKind.VLLM, VllmEngine), (EngineKind.SIM, VllmEngine), (EngineKind.SGLANG, SglangEngine)],
)
async def test_a_kind_has_its_client(kind: EngineKind, client: type) -> None:
    engine = connect(kind, "r1", "http://127.0.0.1:1")
    assert (type(engine), engine.replica_id, engine.url) == (client, "r1", "http://127.0.0.1:1")
    await engine.close()
