"""The two configurations that a tuning analysis compared: verl's production PPO command, and an inference setup that
leaves most of RolloutConfig at its defaults. Each row of its tables is a row here, with what holds of it."""

from pathlib import Path

import pytest

from tests.tuning.doctor.production import write_production
from tuning.doctor.finding import Finding, Severity
from tuning.doctor.rules.all import examine
from tuning.doctor.subject import subject_of

FIXTURES = Path(__file__).parent / "fixtures"
INFERENCE = FIXTURES / "inference.yaml"

HURTS, CONSIDER, FINE = Severity.HURTS, Severity.CONSIDER, Severity.FINE

# What the analysis says of the inference setup, row by row: its item, our rule, the key, the value, who gave it, and
# what we say.
ITEMS = [
    ("prompts cut at 2048 of 4096", "prompt-length", "prompt_length", 2048, "file", HURTS),
    ("responses cut at 512 of 4096", "response-length", "response_length", 512, "file", HURTS),
    ("half of the GPU's memory", "gpu-memory", "gpu_memory_utilization", 0.5, "file", HURTS),
    ("max_model_len is not set", "max-model-len", "max_model_len", None, "default", CONSIDER),
]
# What it calls right, and so do we.
RIGHT = ("tensor-parallel", "max-num-seqs", "verl-sampling", "dtype", "verl-free-cache")
# Where the analysis is wrong: its claim, our rule, the key, what we say, and words of the correction.
CLAIMS = [
    (
        "8192 batched tokens fit one sequence",
        "max-num-batched-tokens",
        "max_num_batched_tokens",
        FINE,
        "does not bound",
    ),
    ("eager mode is needed for RL", "cuda-graphs", "enforce_eager", HURTS, "It does not"),
]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_production(tmp_path_factory.mktemp("production"))


@pytest.fixture(scope="module")
def inference(command: Path) -> list[Finding]:
    return examine(subject_of(verl=INFERENCE, against=command))


@pytest.fixture(scope="module")
def production(command: Path) -> list[Finding]:
    return examine(subject_of(verl=command))


def one(findings: list[Finding], rule: str, key: str) -> Finding:
    found = [finding for finding in findings if finding.rule == rule and finding.key == key]
    assert len(found) == 1, (rule, key, found)
    return found[0]


@pytest.mark.parametrize(("item", "rule", "key", "value", "origin", "severity"), ITEMS, ids=lambda x: str(x))
def test_each_item_is_found_with_its_value_and_who_gave_it(
    inference: list[Finding], item: str, rule: str, key: str, value: object, origin: str, severity: Severity
) -> None:
    found = one(inference, rule, key)
    assert (found.value, found.origin, found.severity) == (value, origin, severity), item
    assert found.place.endswith(f"inference.yaml:{line_of(key)}") if origin == "file" else found.place == ""
    assert found.suggestion
    assert found.source


def test_what_is_right_is_left_alone(inference: list[Finding]) -> None:
    assert not {finding.rule for finding in inference} & set(RIGHT)


@pytest.mark.parametrize(("claim", "rule", "key", "severity", "words"), CLAIMS, ids=lambda x: str(x))
def test_each_claim_that_does_not_hold_is_corrected_with_its_source(
    inference: list[Finding], claim: str, rule: str, key: str, severity: Severity, words: str
) -> None:
    found = one(inference, rule, key)
    assert found.severity is severity
    assert words in found.corrects, claim
    assert "docs/benchmarks.md" in found.source


def test_nothing_else_is_corrected_and_nothing_else_hurts(inference: list[Finding]) -> None:
    assert {finding.rule for finding in inference if finding.corrects} == {rule for _, rule, *_ in CLAIMS}
    expected = {rule for _, rule, _, _, _, severity in ITEMS if severity is HURTS} | {"cuda-graphs"}
    assert {finding.rule for finding in inference if finding.severity is HURTS} == expected


def test_eager_mode_is_told_with_the_figures_of_both_hosts(inference: list[Finding]) -> None:
    effect = one(inference, "cuda-graphs", "enforce_eager").effect
    assert "1.53 times the tokens/s at 64 streams and 1.01 at 512" in effect
    assert "2.5 and 1.13" in effect


def test_raising_batched_tokens_is_known_to_do_nothing_through_verl_to_sglang(inference: list[Finding]) -> None:
    assert "does not pass it to SGLang" in one(inference, "max-num-batched-tokens", "max_num_batched_tokens").message


def test_a_short_response_is_worth_a_look_without_a_comparison() -> None:
    found = examine(subject_of(verl=INFERENCE))
    assert one(found, "response-length", "response_length").severity is CONSIDER
    assert one(found, "prompt-length", "prompt_length").severity is CONSIDER


def test_production_hurts_by_nothing_but_a_key_that_verl_renamed(production: list[Finding]) -> None:
    hurting = {finding.key: finding.suggestion for finding in production if finding.severity is HURTS}
    assert hurting == {
        "critic.model.fsdp_config.param_offload": "critic.fsdp.param_offload",
        "critic.model.fsdp_config.optimizer_offload": "critic.fsdp.optimizer_offload",
    }


def test_production_could_gain_from_replicas_of_one_gpu(production: list[Finding]) -> None:
    assert "tensor-parallel" in {finding.rule for finding in production if finding.severity is CONSIDER}


def line_of(key: str) -> int:
    lines = INFERENCE.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.startswith(f"{key}:"))
