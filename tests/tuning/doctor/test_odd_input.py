"""Files of nonsense: a finding or an error that names the file, never an exception of Python's."""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines.errors import ConfigError
from tuning.doctor.known_keys import trl_defaults, verl_keys
from tuning.doctor.patch import patch_of
from tuning.doctor.report import as_json
from tuning.doctor.rules.all import examine
from tuning.doctor.subject import subject_of

ODD: tuple[Any, ...] = (
    0, -1, 1e300, 10**400, None, "x", [], {}, True, float("nan"), float("inf"), "${a.b}", "${.}", "${oc.select:x,${y}}",
    "1e-6", "true", 10**30, [1, "a"], {"a": {"b": 1}}, "", "\n", "é" * 50, 0.5,
)  # fmt: skip
SCRIPT = r"""set -e
N=${N:-8}
[ $# -lt 1 ] && exit 1
for seed in 1 2; do
  ARGS=(data.seed=$seed "trainer.n_gpus_per_node=$((N / 2))" trainer.logger="['console']")
  python -m verl.trainer.main_ppo "${ARGS[@]}" actor_rollout_ref.rollout.name=vllm \
    data.train_batch_size=$1 "$@"
done
"""
JUNK = ("\x00", "${", "$((", "`", '"', "'", "\\", "<<EOF\n", "{", "}", "\n", "=", ";;", "[[", "é", "exec 3<>/x", "((")


def judge(path: Path, **given: Path) -> None:
    with contextlib.suppress(ConfigError):
        found = examine(subject_of(**given))  # type: ignore[arg-type]  # one of two file arguments
        json.dumps(as_json(found), default=str)
        patch_of(found)


def odd_verl(draw: random.Random) -> dict[str, Any]:
    tree: dict[str, Any] = {"actor_rollout_ref": {"rollout": {"name": draw.choice(["vllm", "sglang", 3])}}}
    for key in draw.sample(list(verl_keys().defaults), draw.randrange(1, 25)):
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node[section] = node[section] if isinstance(node.get(section), dict) else {}
            node = node[section]
        node[name] = draw.choice(ODD)
    return tree


@pytest.mark.parametrize("seed", range(8))
def test_odd_values_end_in_findings_or_in_an_error(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(5):
        path = tmp_path / "verl.yaml"
        path.write_text(yaml.safe_dump(odd_verl(draw)), encoding="utf-8")
        judge(path, verl=path)
        names = draw.sample(list(trl_defaults()), draw.randrange(1, 20))
        path = tmp_path / "trl.yaml"
        odd = {name: draw.choice(ODD) for name in names}
        path.write_text(yaml.safe_dump(odd | {"num_generations": draw.choice([8, 0, -3, "x"])}), encoding="utf-8")
        judge(path, trl=path)


@pytest.mark.parametrize("seed", range(8))
def test_broken_scripts_end_in_findings_or_in_an_error(tmp_path: Path, seed: int) -> None:
    draw, text, path = random.Random(seed), SCRIPT, tmp_path / "train.sh"
    for _ in range(3):
        place = draw.randrange(len(text))
        text = text[:place] + draw.choice(JUNK) + text[place + draw.randrange(20) :]
        path.write_text(text, encoding="utf-8")
        judge(path, verl=path)
