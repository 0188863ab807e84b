"""The patch that `doctor --fix` prints: it applies, and what it repairs is found no longer."""

import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from gateway.cli.main import app
from gateway.config.load import explain, load
from tuning.doctor.finding import Severity
from tuning.doctor.patch import patch_of
from tuning.doctor.rules.all import examine
from tuning.doctor.subject import subject_of

SCRIPT = r"""# rollout.enforce_eager=True stays in this line
ARGS=(
  actor_rollout_ref.rollout.enforce_eager=True # why
  actor_rollout_ref.rollout.tensor_parallel_size=2
)
SEQS=16
python3 -m verl.trainer.main_ppo "${ARGS[@]}" +data.train_batch_size=1024 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.max_num_seqs=$SEQS \
  actor_rollout_ref.model.path=Qwen/Qwen2-7B actor_rollout_ref.actor.loss_agg_mode=token_mean
"""


def apply(patch: str, folder: Path) -> None:
    subprocess.run(["patch", "-p0"], input=patch, text=True, check=True, cwd=folder, timeout=30, capture_output=True)


def test_a_script_is_repaired_where_it_writes_the_values(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT, encoding="utf-8")
    patch = patch_of(examine(subject_of(verl=path)))
    assert path.read_text(encoding="utf-8") == SCRIPT
    apply(patch.replace(f"{tmp_path}/", ""), tmp_path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# rollout.enforce_eager=True stays")
    assert "  actor_rollout_ref.rollout.enforce_eager=false # why\n" in text
    assert "rollout.tensor_model_parallel_size=2\n" in text
    assert " data.train_batch_size=1024 " in text
    assert "max_num_seqs=$SEQS" in text
    assert "loss_agg_mode=token-mean\n" in text
    hurting = {one.rule for one in examine(subject_of(verl=path)) if one.severity is Severity.HURTS}
    assert not hurting & {"cuda-graphs", "verl-keys", "verl-choices"}


def test_a_file_of_ours_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    engine = {"kind": "vllm", "model": "Qwen/Qwen2-7B", "enforce_eager": True, "gpu_memory_utilization": 0.5}
    path.write_text(yaml.safe_dump({"engine": engine}), encoding="utf-8")
    patch = patch_of(examine(subject_of(config=load(path, (), {}), settings=explain(path, (), {}))))
    apply(patch.replace(f"{tmp_path}/", ""), tmp_path)
    found = load(path, (), {}).engine
    assert (found.enforce_eager, found.gpu_memory_utilization) == (False, 0.9)


def test_the_command_prints_the_patch_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("python3 -m verl.trainer.main_ppo trainer.profile_steps=[1]\n", encoding="utf-8")
    done = CliRunner().invoke(app, ["doctor", "--verl", str(path), "--fix"])
    assert done.exit_code == 1
    assert done.stdout.splitlines()[0] == f"--- {path}"
    assert "+python3 -m verl.trainer.main_ppo global_profiler.steps=[1]" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        "data.max_start_length=2048 data.max_prompt_length=4096",  # two keys of one meaning, the last wins
        "data.train_batchsize=8",  # near is not sure
        "trainer.profile_steps=[1] global_profiler.steps=[2]",
    ],
)
def test_a_key_is_renamed_by_the_table_alone_and_never_to_one_that_is_given(tmp_path: Path, words: str) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"python3 -m verl.trainer.main_ppo {words}\n", encoding="utf-8")
    assert words.split("=")[0] + "=" not in patch_of(examine(subject_of(verl=path)))


@pytest.mark.parametrize(
    "words",
    [
        "actor.use_dynamic_bsz=False data.max_response_length=32768",  # the budget is 16384 tokens
        "model.use_liger=False actor_rollout_ref.model.path=Qwen/Qwen2-7B",  # it need not be installed
        "actor.ulysses_sequence_parallel_size=2 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",
    ],
)
def test_half_of_a_change_is_no_patch(tmp_path: Path, words: str) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"python3 -m verl.trainer.main_ppo actor_rollout_ref.{words}\n", encoding="utf-8")
    found = examine(subject_of(verl=path))
    key = f"actor_rollout_ref.{words.split('=')[0]}"
    assert key in [one.key for one in found if one.severity is not Severity.FINE]
    assert patch_of(found) == ""


def test_a_trainer_that_may_run_on_cpu_is_left_as_it_is() -> None:
    assert patch_of(examine(subject_of(trl=Path("examples/train_sort.py")))) == ""
