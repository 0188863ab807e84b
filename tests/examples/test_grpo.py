"""Dry runs of docs/examples.md: fleets by `config validate`, plans by `plan`, the trainers' files by `doctor`."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from gateway.config.load import load
from scripts.docs.parts.grpo_runs import SHAPES
from tests.rigs.shell import NearShell
from tuning.doctor.finding import Severity
from tuning.doctor.rules.all import examine
from tuning.doctor.subject import subject_of

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"^```\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]


def commands(start: str) -> list[list[str]]:
    """The words after `start` in each command of the page that has it."""
    return [shlex.split(line.partition(start)[2], comments=True) for line in LINES if start in line]


PLANS = commands("rollout-gateway plan")
FLEETS = [shlex.split(line, comments=True) for line in LINES if "rollout-gateway up" in line]
TRL, VERL = commands("trl grpo --config"), commands("examples/grpo_verl.sh")
RUNS = list(zip(PLANS, FLEETS, strict=True))
CALLS = list(zip(TRL, VERL, strict=True))


def split_up(words: list[str]) -> tuple[Path, int | None, list[str]]:
    """The file, the number of GPUs in CUDA_VISIBLE_DEVICES, and the keys of a command `up`."""
    before, (_, _, file, *keys) = words[: words.index("rollout-gateway")], words[words.index("rollout-gateway") + 1 :]
    gpus = [len(word.partition("=")[2].split(",")) for word in before]
    return ROOT / file, gpus[0] if gpus else None, keys


@pytest.fixture
def shell(tmp_path: Path) -> NearShell:
    shell = NearShell(tmp_path)
    del shell.environ["ROLLOUT_GATEWAY_NAME"]
    shell.environ |= {"ROLLOUT_INFERENCE_KEY": "one", "ROLLOUT_ADMIN_KEY": "two"}
    return shell


def test_the_page_has_a_plan_for_each_fleet_and_both_trainers_for_each_size() -> None:
    assert len(RUNS) == len(CALLS) + 2 >= 8


@pytest.mark.parametrize(("plan", "fleet"), RUNS, ids=[" ".join(fleet) for fleet in FLEETS])
def test_a_fleet_is_valid_and_lacks_nothing_but_gpus(shell: NearShell, plan: list[str], fleet: list[str]) -> None:
    file, gpus, keys = split_up(fleet)
    group = load(file, keys).groups["engine"]
    assert gpus in (None, group.num_replicas * group.world_size)
    done = shell.run("config", "validate", "-c", str(file), *keys)
    first, *lacks = done.stdout.splitlines()
    assert first == f"valid: engine x {group.num_replicas}", done.stderr
    assert all("GPU" in line for line in lacks), lacks


@pytest.mark.parametrize(("plan", "fleet"), RUNS, ids=[" ".join(plan) for plan in PLANS])
def test_a_plan_fits_and_its_lengths_are_the_fleets(shell: NearShell, plan: list[str], fleet: list[str]) -> None:
    group = load(*split_up(fleet)[::2]).groups["engine"]
    model = plan[plan.index("-m") + 1]
    assert group.model == model
    shape = ",".join(f"{key}={json.dumps(value)}" for key, value in SHAPES[model].items())
    words = ["--shape" if word == "-m" else shape if word == model else word for word in plan]
    done = shell.run("plan", *words, "--json")
    assert done.returncode == 0, done.stderr
    longest = [int(words[words.index(option) + 1].split(":")[1]) for option in ("--prompt", "--response")]
    assert sum(longest) == group.max_model_len
    choices = json.loads(done.stdout)["choices"]
    assert any(choice["replicas"] == group.num_replicas for choice in choices)


@pytest.mark.parametrize("call", TRL, ids=[" ".join(call) for call in TRL])
def test_trl_knows_every_option_and_gets_the_batch_of_the_page(call: list[str]) -> None:
    trl = pytest.importorskip("trl")
    from trl.scripts.grpo import GRPOScriptArguments

    kinds = (GRPOScriptArguments, trl.GRPOConfig, trl.ModelConfig)
    known = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    given = yaml.safe_load((ROOT / call[0]).read_text(encoding="utf-8"))
    options = options_of(call[1:])
    processes = int(options.pop("num_processes", 1))
    options.pop("accelerate_config", None)
    given |= options
    assert set(given) <= known
    completions = int(given["per_device_train_batch_size"]) * processes * int(given["gradient_accumulation_steps"])
    assert completions == 128 * given["num_generations"]


def options_of(words: list[str]) -> dict[str, str]:
    """Options and values; one without a value is a switch."""
    return {name: value.strip() for name, value in re.findall(r"--(\w+)((?: (?!--)\S+)?)", " ".join(words))}


@pytest.mark.parametrize(
    ("trl", "verl"), [(EXAMPLES / "grpo_trl.yaml", None), (None, EXAMPLES / "grpo_verl.sh")], ids=["trl", "verl"]
)
def test_nothing_in_a_trainers_file_hurts(trl: Path | None, verl: Path | None) -> None:
    findings = examine(subject_of(config=load(EXAMPLES / "grpo.yaml"), trl=trl, verl=verl))
    assert [found.rule for found in findings if found.severity is Severity.HURTS] == []
