"""The deployment examples: configurations by the product's own loader, commands by the parsers that would read them."""

import importlib.util
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from gateway.cli.main import app
from gateway.config.load import load
from gateway.config.schema import Config

FOLDER = Path(__file__).parents[2] / "examples" / "deploy"
ROOT = FOLDER.parents[1]
SCRIPTS = ("slurm.sh",)
KUBERAY = FOLDER / "kuberay-rayservice.yaml"


def ray_service() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(KUBERAY.read_text())
    return found


def kuberay_config(tmp_path: Path) -> Config:
    document = tmp_path / "serve.yaml"
    document.write_text(ray_service()["spec"]["serveConfigV2"])
    return load(document)


def commands(file: Path, program: str) -> Iterator[list[str]]:
    """The words after `program` in each of its calls in a script or a unit; comments too, which show usage."""
    text = file.read_text().replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.split(line.lstrip("# "), comments=False) if "'" not in line else line.split()
        for index, word in enumerate(words):
            is_call = Path(word.removeprefix("ExecStart=").removeprefix("ExecStop=")).name == program
            if is_call and index + 1 < len(words):
                yield [other for other in words[index + 1 :] if other not in ("||", "true", ">/dev/null", "&")]
                break


def parse(verb: str, words: list[str]) -> None:
    """Parse a command as the console script would, without running it."""
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    command.make_context(verb, words, resilient_parsing=False)


@pytest.mark.parametrize("name", ["one-node.yaml", "several-nodes.yaml"])
def test_a_configuration_is_valid(name: str) -> None:
    config = load(FOLDER / name)
    assert config.gateway.admin_keys
    assert config.groups["engine"].num_replicas > 1


def test_every_configuration_of_the_folder_is_tested() -> None:
    assert {file.name for file in FOLDER.glob("*.yaml")} == {"one-node.yaml", "several-nodes.yaml", KUBERAY.name}


def test_the_ray_service_holds_a_valid_configuration_and_the_gpus_for_it(tmp_path: Path) -> None:
    config = kuberay_config(tmp_path)
    (group,) = config.groups.values()
    (workers,) = ray_service()["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    given = workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert given == group.num_replicas * group.world_size
    per_pod = group.num_replicas / workers["replicas"]
    assert int(container["resources"]["requests"]["cpu"]) >= per_pod * group.num_cpus


def test_the_pods_have_the_gateways_port_and_every_variable_of_its_keys(tmp_path: Path) -> None:
    config = kuberay_config(tmp_path)
    cluster = ray_service()["spec"]["rayClusterConfig"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    containers = [pod["template"]["spec"]["containers"][0] for pod in pods]
    assert config.gateway.port in {port["containerPort"] for port in containers[0]["ports"]}
    keys = [*config.gateway.inference_keys, *config.gateway.admin_keys]
    named = {key.get_secret_value().removeprefix("env:") for key in keys}
    for container in containers:
        assert {variable["name"] for variable in container["env"]} == named
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted == {"/dev/shm"}


def test_the_ray_of_the_service_is_the_ray_of_the_package() -> None:

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (
        f"ray[serve]=={ray_service()['spec']['rayClusterConfig']['rayVersion']}"
        in project["optional-dependencies"]["serve"]
    )
    assert KUBERAY.read_text().count(f"rollout-gateway:{project['version']}") == 2


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_valid_bash(name: str) -> None:
    subprocess.run(["bash", "-n", FOLDER / name], check=True)


def test_the_variables_of_the_keys_are_set_by_the_batch_script() -> None:
    script = (FOLDER / "slurm.sh").read_text()
    for variable in ("ROLLOUT_INFERENCE_KEY", "ROLLOUT_ADMIN_KEY"):
        assert f"env:{variable}" in (FOLDER / "several-nodes.yaml").read_text()
        assert f"{variable}=$(openssl rand -hex 32)" in script


@pytest.mark.parametrize("name", ["slurm.sh", "rollout-gateway.service", "one-node.yaml", "several-nodes.yaml"])
def test_commands_of_the_gateway_are_understood(name: str) -> None:
    config = str(FOLDER / "several-nodes.yaml")
    found = [
        [config if word == "$config" else word for word in words]
        for words in commands(FOLDER / name, "rollout-gateway")
        if words[0] in ("up", "down")
    ]
    assert found
    for verb, *words in found:
        parse(verb, words)


def test_rays_commands_have_options_that_ray_knows() -> None:
    found = list(commands(FOLDER / "slurm.sh", "ray")) + list(commands(FOLDER / "several-nodes.yaml", "ray"))
    assert {verb for verb, *_ in found} == {"start", "stop", "get-auth-token"}
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    source = (Path(ray.origin).parent / "scripts" / "scripts.py").read_text()
    options = {word.partition("=")[0] for words in found for word in words if word.startswith("--")}
    assert {option for option in options if f'"{option}"' not in source} == set()


@pytest.mark.slow
def test_the_dockerfile_installs_a_gateway_that_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.deploy.dockerfile_steps", "--root", tmp_path, "--arg", "EXTRAS=serve"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=900,
    )
    assert done.stdout.splitlines()[-1].startswith("rollout-gateway ")
