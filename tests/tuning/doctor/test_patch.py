"""The patch that `doctor --fix` prints: it applies, and what it repairs is found no longer."""

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.main import app
from tuning.doctor.patch import patch_of
from tuning.doctor.rules.all import examine
from tuning.doctor.subject import subject_of

SCRIPT = r"""# rollout.tensor_parallel_size=2 stays in this line
ARGS=(
  actor_rollout_ref.rollout.enforce_eager=True
  actor_rollout_ref.rollout.tensor_parallel_size=2 # why
)
python3 -m verl.trainer.main_ppo "${ARGS[@]}" actor_rollout_ref.rollout.name=vllm
"""


def test_a_script_is_repaired_where_it_writes_the_key_and_no_value_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT, encoding="utf-8")
    patch = patch_of(examine(subject_of(verl=path))).replace(f"{tmp_path}/", "")
    assert path.read_text(encoding="utf-8") == SCRIPT
    subprocess.run(["patch", "-p0"], input=patch, text=True, check=True, cwd=tmp_path, timeout=30, capture_output=True)
    repaired = SCRIPT.replace(
        "  actor_rollout_ref.rollout.tensor_parallel", "  actor_rollout_ref.rollout.tensor_model_parallel"
    )
    assert path.read_text(encoding="utf-8") == repaired
    assert "verl-keys" not in {one.rule for one in examine(subject_of(verl=path))}


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
