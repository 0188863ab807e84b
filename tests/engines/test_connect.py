"""Each kind of engine is talked to in its own words."""

import pytest

from engines.connect import connect
from engines.sglang_engine import SglangEngine
from engines.types import EngineKind
from engines.vllm_engine import VllmEngine


@pytest.mark.parametrize(
    ("kind", "client"),
    [(EngineKind.VLLM, VllmEngine), (EngineKind.SIM, VllmEngine), (EngineKind.SGLANG, SglangEngine)],
)
async def test_a_kind_has_its_client(kind: EngineKind, client: type) -> None:
    engine = connect(kind, "r1", "http://127.0.0.1:1", "0.26.0")
    assert (type(engine), engine.replica_id, engine.url) == (client, "r1", "http://127.0.0.1:1")
    await engine.close()
