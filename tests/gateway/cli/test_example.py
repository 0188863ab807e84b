"""`rollout-gateway example`: what it lists, and what it writes out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.errors import ConfigError
from gateway.cli.example import write_example
from gateway.config.load import load
from tests.rigs.shell import NearShell

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_it_lists_examples_with_their_titles(tmp_path: Path) -> None:
    done = NearShell(tmp_path).run("example")
    assert done.returncode == 0
    titles = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert titles["sim.yaml"] == "Four simulated engines"
    assert titles["verl_cpu.sh"].startswith("verl's own GRPO trainer on CPU")
    assert all(EXAMPLES.joinpath(name).is_file() for name in titles)


def test_an_example_comes_with_its_model_and_runs_from_the_same_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = NearShell(tmp_path).run("example", "tiny-cpu.yaml")
    written = [Path(line) for line in done.stdout.splitlines()]
    assert Path("examples/tiny_model/digit-sort/model.safetensors") in written
    assert not list(tmp_path.glob("examples/tiny_model/*.py"))
    monkeypatch.chdir(tmp_path)
    assert load(Path("examples/tiny-cpu.yaml")).groups["engine"].num_replicas == 2


def test_an_example_in_python_comes_with_the_modules_that_it_imports(tmp_path: Path) -> None:
    write_example("train_sort.py", tmp_path)
    words = [sys.executable, "-c", "import examples.tiny_model.task as task; print(task.__file__)"]
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path))
    assert (tmp_path / "examples" / "sort_agent.py").is_file()


def test_a_script_stays_executable(tmp_path: Path) -> None:
    write_example("verl_cpu.sh", tmp_path)
    assert os.access(tmp_path / "examples" / "verl_cpu.sh", os.X_OK)


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / "examples" / "sim.yaml"
    mine.parent.mkdir()
    mine.write_text("mine")
    write_example("examples/sim.yaml", tmp_path)
    assert mine.read_text() == "mine"


def test_an_unknown_example_is_refused_with_the_remedy(tmp_path: Path) -> None:
    done = NearShell(tmp_path).run("example", "none.yaml")
    assert done.returncode == 1
    assert done.stderr == "rollout-gateway: there is no example none.yaml; `rollout-gateway example` lists them\n"
    with pytest.raises(ConfigError):
        write_example("none.yaml", tmp_path)
