"""Fixtures that start gateways over simulated engines, see `rig.py`; and the hooks of six files beside this one."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from engines.config import SimConfig
from gateway.cli.cluster.ray_head import SERVE_ENVIRONMENT
from gateway.config.schema import Config
from tests.material.garbage import pytest_collection as pytest_collection
from tests.material.garbage import pytest_collection_finish as pytest_collection_finish
from tests.material.garbage import pytest_unconfigure as pytest_unconfigure
from tests.rigs.engines.real_vllm import pytest_sessionfinish as pytest_sessionfinish
from tests.rigs.rig import FAST_WATCH, Json, Rig, SimReplica, StartRig
from tests.running.client_records import pytest_runtest_logreport as pytest_runtest_logreport
from tests.running.client_records import pytest_runtest_setup as pytest_runtest_setup
from tests.running.engine_environment import pytest_fixture_setup as pytest_fixture_setup
from tests.running.engine_environment import pytest_pyfunc_call as pytest_pyfunc_call
from tests.running.selection import pytest_ignore_collect as pytest_ignore_collect
from tests.running.spreading import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler

os.environ |= {**SERVE_ENVIRONMENT, **os.environ}
# Facts hold at every speed of the machine; hypothesis would fail an example that takes 0.2 s.
settings.register_profile("at any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("at any speed")


@pytest.fixture(autouse=True)
def log_lines() -> Iterator[None]:
    """Log lines go where they went before a test that runs what a process runs at its start."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture
async def start_rig() -> AsyncIterator[StartRig]:
    """Starts rigs: `await start_rig(num_replicas=2, sim={...}, odd={"engine-1": {...}}, weights={...})`."""
    rigs: list[Rig] = []

    async def start(
        num_replicas: int = 2,
        sim: Json | None = None,
        odd: dict[str, Json] | None = None,
        replicas: list[SimReplica] | None = None,
        **sections: Json,
    ) -> Rig:
        engine = {"kind": "sim", "model": "sim", "num_replicas": num_replicas}
        weights = {"store": None} | sections.pop("weights", {})
        gateway = {"ledger": None} | sections.pop("gateway", {})
        tree = {"engine": engine, "fleet": FAST_WATCH, "weights": weights, "gateway": gateway, **sections}
        fast = {"decode_step_s": 0.0, "decode_step_per_seq_s": 0.0}
        rig = Rig(Config.model_validate(tree), SimConfig.model_validate(fast | (sim or {})), odd)
        rigs.append(rig)
        return await rig.start(replicas)

    yield start
    for rig in rigs:
        await rig.stop()


@pytest.fixture
async def rig(start_rig: StartRig) -> Rig:
    """Two fast replicas."""
    return await start_rig()


@pytest.fixture
async def kept_rig(start_rig: StartRig, tmp_path: Path) -> Rig:
    """Two replicas behind a gateway with a ledger."""
    return await start_rig(2, gateway={"ledger": str(tmp_path / "ledger")})
