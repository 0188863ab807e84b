"""The two configurations that a tuning analysis compared: verl's production PPO command, and an inference setup that
leaves most of RolloutConfig at its defaults. What the analysis says of them is judged, and printed."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from tuning.doctor.finding import Finding, Severity
from tuning.doctor.report import as_json, print_findings
from tuning.doctor.rules.all import examine
from tuning.doctor.subject import subject_of

INFERENCE = Path(__file__).parent / "fixtures" / "inference.yaml"
EXAMPLE = Path(__file__).parents[3] / "examples" / "verl_qwen2_7b.sh"
OF_THE_GATEWAY = ("trainer.v1.trainer_mode=", "+trainer.v1.gateway.", "+ray_kwargs.ray_init.address=")
HURTS, CONSIDER, FINE = Severity.HURTS, Severity.CONSIDER, Severity.FINE
# What the analysis says of the inference setup: our rule, the key, the value, who gave it, what we say, and words of
# the correction where the analysis is wrong.
ITEMS = [
    ("prompt-length", "prompt_length", 2048, "file", HURTS, ""),
    ("response-length", "response_length", 512, "file", HURTS, ""),
    ("gpu-memory", "gpu_memory_utilization", 0.5, "file", HURTS, ""),
    ("max-model-len", "max_model_len", None, "default", CONSIDER, ""),
    ("max-num-batched-tokens", "max_num_batched_tokens", 8192, "default", FINE, "does not bound"),
    ("cuda-graphs", "enforce_eager", True, "file", HURTS, "It does not"),
]
RIGHT = {"tensor-parallel", "max-num-seqs", "verl-sampling", "dtype", "verl-free-cache"}


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as people have it who know no gateway, with two keys that verl has renamed since."""
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not line.strip().startswith(OF_THE_GATEWAY)]
    assert len(kept) == len(lines) - len(OF_THE_GATEWAY)
    path = tmp_path_factory.mktemp("production") / "production.sh"
    path.write_text("".join(kept).replace("critic.fsdp.", "critic.model.fsdp_config."), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def inference(production: Path) -> list[Finding]:
    return examine(subject_of(verl=INFERENCE, against=production))


def test_each_item_is_found_with_its_place_and_corrected_where_it_is_wrong(inference: list[Finding]) -> None:
    lines = INFERENCE.read_text(encoding="utf-8").splitlines()
    for rule, key, value, origin, severity, correction in ITEMS:
        (found,) = [one for one in inference if (one.rule, one.key) == (rule, key)]
        assert (found.value, found.origin, found.severity) == (value, origin, severity)
        assert bool(found.corrects) == bool(correction)
        assert correction in found.corrects
        if origin == "file":
            line = next(number for number, text in enumerate(lines, start=1) if text.startswith(f"{key}:"))
            assert found.place.endswith(f"inference.yaml:{line}")
    assert {one.rule for one in inference if one.severity is HURTS} == {row[0] for row in ITEMS if row[4] is HURTS}
    assert not {one.rule for one in inference} & RIGHT


def test_production_hurts_by_nothing_but_a_key_that_verl_renamed(production: Path) -> None:
    found = examine(subject_of(verl=production))
    assert {finding.key: finding.suggestion for finding in found if finding.severity is HURTS} == {
        "critic.model.fsdp_config.param_offload": "critic.fsdp.param_offload",
        "critic.model.fsdp_config.optimizer_offload": "critic.fsdp.optimizer_offload",
    }


def test_findings_are_plain_lines_that_are_not_folded_and_whole_in_json(inference: list[Finding]) -> None:
    out = io.StringIO()
    print_findings(Console(file=out, width=80), inference)
    (line,) = [line for line in out.getvalue().splitlines() if "enforce_eager = true" in line]
    assert line.startswith("hurts: verl rollout: enforce_eager = true (")
    assert line.endswith("so batches may be of any size")
    assert out.getvalue().endswith("4 that hurt, 1 to consider\n")
    told = as_json(inference)
    assert told["counts"] == {"hurts": 4, "consider": 1, "fine": 1}
    (memory,) = [one for one in told["findings"] if one["rule"] == "gpu-memory"]
    assert (memory["severity"], memory["value"], memory["effect"]) == ("hurts", 0.5, "1.7 times the memory")
    assert memory["source"]
