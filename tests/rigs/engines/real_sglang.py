"""Real SGLang servers on CPU for tests marked `sglang`, from the environment that `make setup-sglang` makes."""

from pathlib import Path
from typing import Any

from engines.config import EngineConfig
from engines.types import EngineKind

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
ENV = {"PYTHONPATH": str(ROOT / "tests" / "sglang_cpu")}


def engine_config(model: Path, log_dir: Path, **levers: Any) -> EngineConfig:
    """As `real_vllm.engine_config` has it for vLLM."""
    return EngineConfig(
        **{
            "kind": EngineKind.SGLANG,
            "python": str(PYTHON),
            "env": ENV,
            "model": str(model),
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 64,
            "extra": {"max_total_tokens": 16384},
            "log_dir": str(log_dir),
            "stop_timeout_s": 5.0,
            **levers,
        }
    )
