"""GRPOTrainer of TRL 1.10 against two simulated engines: the recipe of docs/trl.md, with that TRL before ours.

    pip download --no-deps trl==1.10.0 && unzip -d TRL trl-1.10.0-*.whl
    TRL_LEGACY=TRL python -m pytest -m slow tests/trainer_client/test_trl_legacy.py

What its own client sends and reads is tested everywhere: tests/gateway/test_trl_legacy.py.
"""

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

from safetensors import safe_open

from engines.config import EngineConfig, SimConfig
from engines.types import EngineKind
from examples.tiny_model.train import COMMITTED
from tests.client_records import runs_client
from tests.real_vllm import app
from tests.trainer_client.test_real_trl import ROOT, STEPS, Record, run_recipe, versions

LEGACY = os.environ.get("TRL_LEGACY", "")


@pytest.mark.slow
@pytest.mark.skipif(not LEGACY, reason="TRL_LEGACY names no folder with TRL 1.10.0")
@runs_client(
    "TRL GRPOTrainer, legacy",
    "trl==1.10.0",
    ran="docs/trl.md: weights through the store",
    against="2 simulated engines",
)
def test_grpo_of_trl_1_10_syncs_before_every_step(tmp_path: Path, record_property: Record) -> None:
    with safe_open(COMMITTED / "model.safetensors", "np") as file:
        tensors = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    engine = EngineConfig(
        kind=EngineKind.SIM,
        model=str(COMMITTED),
        served_model_name=str(COMMITTED.relative_to(ROOT)),
        num_replicas=2,
        max_model_len=512,
        log_dir=str(tmp_path),
        sim=SimConfig(vocab_size=128, tensors=tensors),
    )
    with app({"engine": engine}, gateway={"port": 0, "trl_legacy": True}) as fleet:
        assert len(run_recipe("TRL 1.10 and older", fleet.url, tmp_path, before=[LEGACY])) == STEPS
        assert versions(fleet) == [STEPS, STEPS]
    record_property("fact", f"{STEPS} steps, {STEPS} versions")
