"""The section about weight updates in docs/engines.md."""

import json
from pathlib import Path

from scripts.docs.parts.updates_matrix import Check, read_checks, section


def _check(kind: str, transport: str, *distances: float) -> Check:
    versions = [{"distance": distance} for distance in distances]
    return {"engine": "sglang 1", "device": "GPU", "transport": transport, "kind": kind, "versions": versions}


def test_a_cell_is_the_largest_distance_and_empty_where_nothing_ran() -> None:
    lines = section([_check("dense", "nccl", 0.001, 0.0123), _check("experts", "store", 0.5)])
    assert "| engine | transport | dense | experts |" in lines
    assert "| SGLang 1 on GPU | nccl | 0.012 |  |" in lines
    assert "| SGLang 1 on GPU | store |  | 0.500 |" in lines


def test_a_later_check_replaces_the_earlier(tmp_path: Path) -> None:
    for name, distance in (("2026-02-01-served-check", 0.2), ("2026-01-01-update-check-small", 0.1)):
        (tmp_path / f"{name}.json").write_text(json.dumps([_check("dense", "nccl", distance)]))
    assert "| SGLang 1 on GPU | nccl | 0.200 |" in section(read_checks(tmp_path))
