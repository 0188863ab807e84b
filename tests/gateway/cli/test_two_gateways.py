"""Two gateways on one node, by the commands of docs/deployment.md, with a Ray for each; and what one Ray refuses."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.process.port import HeldPort
from tests.rigs.ray_app import App
from tests.rigs.shell import NAME, SIM, Shell, clusterless

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PAGE = (Path(__file__).parents[3] / "docs" / "deployment.md").read_text(encoding="utf-8")
SECOND = f"{NAME}-b"


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Four ports that no engine draws before they are bound."""
    held = [HeldPort() for _ in range(4)]
    yield [port.number for port in held]
    for port in held:
        port.release()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with clusterless(Shell(tmp_path)) as shell:
        yield shell


def printed(**values: object) -> list[list[str]]:
    """The words after `rollout-gateway` in the commands of the section, with these values of keys and options."""
    (section,) = re.findall(r"^## Two gateways on one node\n.*?```\n(.*?)```", PAGE, re.M | re.S)
    found = []
    for line in section.splitlines():
        words = shlex.split(line)[shlex.split(line).index("rollout-gateway") + 1 :]
        keys = [word.partition("=")[0] for word in words]
        words = [f"{key}={values[key]}" if key in values else word for key, word in zip(keys, words, strict=True)]
        found.append(
            [SECOND if before == "--name" else word for before, word in zip(["", *words], words, strict=False)]
        )
    return found


def test_two_gateways_with_a_ray_each_serve_update_and_end_apart(shell: Shell, ports: list[int]) -> None:
    first_control, dashboard, rollouts, control = ports
    (shell.folder / "a.yaml").write_text(SIM.replace("http_port: 0", f"http_port: {first_control}"))
    (shell.folder / "b.yaml").write_text(SIM)
    first_address, second_address = shell.environ["RAY_DASHBOARD_ADDRESS"], f"http://127.0.0.1:{dashboard}"
    keys = {"name": SECOND, "gateway.port": rollouts, "serve.http_port": control}
    up_first, up_second, status_second, down_second = printed(**keys)

    assert shell.run(*up_first).returncode == 0
    first = App(f"http://127.0.0.1:{first_control}")
    refused_on_one_ray(shell, keys)
    assert first.states() == ["SERVING", "SERVING"]

    shell.environ["RAY_DASHBOARD_ADDRESS"] = second_address
    try:
        refused_with_one_name(shell)
        done = shell.run(*up_second)
        assert done.returncode == 0, done.stderr
        second = App(f"http://127.0.0.1:{control}")
        assert second.url.endswith(f":{keys['gateway.port']}")
        second.update()
        assert [version_of(app) for app in (first, second)] == [0, 1]
        assert shell.run(*status_second).returncode == 0
        assert shell.run(*down_second).stdout == f"{SECOND} is down\n"
    finally:
        shell.run("down", "--name", SECOND)
        shell.environ["RAY_DASHBOARD_ADDRESS"] = first_address
    assert first.states() == ["SERVING", "SERVING"]
    assert version_of(first) == 0


def refused_on_one_ray(shell: Shell, keys: dict[str, object]) -> None:
    """`up` names the two remedies."""
    done = shell.run("up", "-c", "b.yaml", *(f"{key}={value}" for key, value in keys.items()))
    assert done.returncode == 1
    assert f"serves the application {NAME!r} at /, and has room for one gateway's control plane" in done.stderr
    assert f"give {SECOND!r} a Ray of its own with RAY_DASHBOARD_ADDRESS=" in done.stderr


def refused_with_one_name(shell: Shell) -> None:
    """A name is a weight store and a ledger: two gateways never share one."""
    done = shell.run("up", "-c", "b.yaml")
    assert done.returncode == 1
    assert f"{NAME} is up already" in done.stderr
    assert "set another `name`" in done.stderr


def version_of(app: App) -> int:
    (version,) = {span["version"] for choice in app.complete() for span in choice["weight_versions"]}
    return int(version)
