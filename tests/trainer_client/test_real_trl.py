"""The recipes of docs/trl.md, run as they stand against two real vLLM replicas (CPU) behind a gateway."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

from engines.process.port import free_port
from examples.tiny_model.task import COMMITTED
from tests.rigs.engines.real_vllm import RealFleet, app, engine_config
from tests.running.client_records import runs_client, vllm_replicas

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
STEPS = 3
CLOSE = 1e-3
"""How far the trainer's probabilities may be from the engines', as a ratio. Both compute in float32."""
_EPILOGUE = """
if __name__ == "__main__":
    import json
    print("LOGS " + json.dumps(trainer.state.log_history))
"""

RATIO = "sampling/importance_sampling_ratio"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    # AsyncGRPO asks for the model by the name that the recipe gives it.
    levers = {"num_replicas": 2, "served_model_name": str(COMMITTED.relative_to(ROOT))}
    levers |= {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    engine = engine_config(COMMITTED, tmp_path_factory.mktemp("logs")).model_copy(update=levers)
    with app({"engine": engine}) as running:
        yield running


def recipe(heading: str, url: str) -> str:
    """The program under `heading`, with another URL and a group port that is free here."""
    page = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert "http://127.0.0.1:8100" in code
    code = code.replace("http://127.0.0.1:8100", url)
    return str(code.replace('vllm_mode="server"', f'vllm_mode="server", vllm_group_port={free_port()}'))


def run_recipe(heading: str, url: str, folder: Path) -> list[dict[str, Any]]:
    """Runs it to its end; what it logged at each step."""
    program = folder / "recipe.py"
    program.write_text(recipe(heading, url) + _EPILOGUE)
    (folder / "examples").symlink_to(ROOT / "examples")
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, program], cwd=folder, env=environ, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (logs,) = [line.removeprefix("LOGS ") for line in done.stdout.splitlines() if line.startswith("LOGS ")]
    print(heading, logs)
    return [entry for entry in json.loads(logs) if "loss" in entry]


def versions(real: RealFleet) -> list[int]:
    return [replica["weight_version"] for replica in real.call("/status")[1]["replicas"]]


AGAINST = vllm_replicas(2)
Record = Callable[[str, object], None]


def record_ratio(record: Record, ratios: Sequence[float]) -> None:
    furthest = max(abs(ratio - 1) for ratio in ratios)
    assert furthest < CLOSE
    record("fact", f"importance ratio within {max(furthest, 1e-6):.0e} of 1")


# First, since it wants engines that hold the checkpoint.
@pytest.mark.slow
@runs_client("TRL AsyncGRPOTrainer, LoRA", "trl", ran="docs/trl.md: an adapter synced at every step", against=AGAINST)
def test_async_grpo_with_lora_moves_adapters_alone(real: RealFleet, tmp_path: Path, record_property: Record) -> None:
    steps = run_recipe("AsyncGRPOTrainer, LoRA", real.url, tmp_path)
    assert len(steps) == STEPS
    assert versions(real) == [0, 0]
    assert [adapter["name"] for adapter in real.call("/status")[1]["adapters"]][-1] == f"trl-policy-v{STEPS + 1}"
    record_ratio(record_property, [step["ratio"] for step in steps])


@pytest.mark.slow
@runs_client("TRL AsyncGRPOTrainer, weights", "trl", ran="docs/trl.md: all weights at every step", against=AGAINST)
def test_async_grpo_syncs_whole_weights_at_every_step(real: RealFleet, tmp_path: Path, record_property: Record) -> None:
    steps = run_recipe("AsyncGRPOTrainer, whole weights", real.url, tmp_path)
    assert len(steps) == STEPS
    assert versions(real) == [STEPS + 1, STEPS + 1]
    record_ratio(record_property, [step["ratio"] for step in steps])


@runs_client("TRL GRPOTrainer", "trl", ran="digit-sorting, weights synced before each step", against=AGAINST)
def test_grpo_syncs_before_every_step(real: RealFleet, tmp_path: Path, record_property: Record) -> None:
    before = versions(real)
    steps = run_recipe("GRPOTrainer", real.url, tmp_path)
    assert len(steps) == STEPS
    assert versions(real) == [version + STEPS for version in before]
    record_ratio(record_property, [step[f"{RATIO}/mean"] for step in steps])


@pytest.mark.slow
@runs_client("TRL GRPOTrainer, pool", "trl", ran="docs/trl.md: each step takes the first groups", against=AGAINST)
def test_grpo_out_of_a_pool_syncs_before_every_step(real: RealFleet, tmp_path: Path, record_property: Record) -> None:
    before = versions(real)
    steps = run_recipe("GRPOTrainer with a pool", real.url, tmp_path)
    assert len(steps) == STEPS
    assert versions(real) == [version + STEPS for version in before]
    assert all(step["completions/mean_length"] > 1 for step in steps)
    record_ratio(record_property, [steps[0][f"{RATIO}/mean"]])  # later ones have tokens of older weights


@runs_client("TRL GRPOTrainer, agent", "trl", ran="docs/trl.md: sessions of an agent with a tool", against=AGAINST)
def test_grpo_trains_on_sessions_of_an_agent(real: RealFleet, tmp_path: Path, record_property: Record) -> None:
    before = versions(real)
    steps = run_recipe("GRPOTrainer with an agent", real.url, tmp_path)
    assert len(steps) == STEPS
    assert versions(real) == [version + STEPS for version in before]
    record_ratio(record_property, [step[f"{RATIO}/{which}"] for step in steps for which in ("min", "mean", "max")])


@pytest.mark.slow
@runs_client("TRL RLOOTrainer", "trl", ran="docs/trl.md: weights synced before each step", against=AGAINST)
def test_rloo_syncs_before_every_step(real: RealFleet, tmp_path: Path) -> None:
    before = versions(real)
    assert len(run_recipe("RLOOTrainer", real.url, tmp_path)) == STEPS
    assert versions(real) == [version + STEPS for version in before]
