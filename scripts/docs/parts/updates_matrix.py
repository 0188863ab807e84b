"""Makes the section of docs/engines.md about weight updates from the checks in docs/results/."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.docs.parts.table import table

RESULTS = Path(__file__).parents[3] / "docs" / "results"

_HEAD = """## Weight updates

Weights that arrive are the weights that were sent: small random models, updated behind a gateway (`served_check`) or
in vLLM's worker alone (`update_check` of commit c0c3c6b9), judged by transformers on the weights that the trainer
sent. A cell is the largest mean distance of log-probabilities of 32 prompts after any update, an aborted or refused
one too, in nats; from the weights of the version before it is above 1 everywhere. bfloat16 arithmetic causes up to
0.02, fp8 0.25. TP and PP are GPUs that share a replica's model, EP experts apart on them. Empty cells did not run.

    python -m loadtests.studies.weights.served_check -c FILE.yaml dense experts --transport nccl --device cuda:1
"""

Check = dict[str, Any]


def read_checks(folder: Path = RESULTS) -> list[Check]:
    """Return the checks of all kept runs, the earliest first."""
    paths = sorted({*folder.glob("*-served-check*.json"), *folder.glob("*-update-check*.json")})
    return [check for path in paths for check in json.loads(path.read_text(encoding="utf-8"))]


def section(checks: Sequence[Check]) -> list[str]:
    """Return the section's lines. A later check of the same engine, transport and model replaces the earlier."""
    kinds = list(dict.fromkeys(check["kind"] for check in checks))
    cells = {(_way(check), check["kind"]): _cell(check) for check in checks}
    ways = sorted({way for way, _ in cells})
    rows = [[*way, *(cells.get((way, kind), "") for kind in kinds)] for way in ways]
    return [_HEAD, *table(["engine", "transport", *kinds], rows), ""]


def _way(check: Check) -> tuple[str, str]:
    engine = check["engine"].replace("sglang", "SGLang").replace("vllm", "vLLM")
    split = f", {check['split']}" if check.get("split") else ""
    return f"{engine} on {check['device']}{split}", check["transport"]


def _cell(check: Check) -> str:
    return f"{max(version['distance'] for version in check['versions']):.3f}"
