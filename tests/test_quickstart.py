"""A stranger follows docs/quickstart.md in an empty home: what it prints is run, with a clone and with a wheel."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLONE, WHEEL = "From a clone", "Or from a wheel"
USE = ("Start a fleet", "Look closer", "Stop it")
_BLOCK = re.compile(r"^```\n(.*?)^```$", re.M | re.S)
_MACHINES = ("PIP_", "OPENBLAS_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""What a machine's environment has to say of its indexes and its processor. Nothing else of it reaches the stranger."""
_BOUND_S = 1200.0  # a hang


def commands(page: str, *headings: str) -> list[str]:
    """The commands that the blocks of these sections print, without their comments."""
    found = []
    for heading in headings:
        (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
        lines = "".join(_BLOCK.findall(section)).replace("\\\n", " ").splitlines()
        found += [re.sub(r"\s{2,}# .*", "", line) for line in lines]
    return found


def test_the_readme_installs_as_the_quickstart_does() -> None:
    assert commands(README, "Install it") == commands(QUICKSTART, CLONE, WHEEL)
    assert set(commands(QUICKSTART, "Start a fleet", "Stop it")) <= set(commands(README, "Use it"))


def test_pages_name_the_wheel_of_this_version_and_the_changelog_has_it() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    named = {found for page in pages for found in re.findall(r"rollout_gateway-(\S+?)-py3", page.read_text("utf-8"))}
    assert named == {version}
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


class Stranger:
    """Types commands into a shell that knows nothing but a folder, which is its home."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        python = str(Path(sys.base_prefix) / "bin")
        machine = {name: value for name, value in os.environ.items() if name.upper().startswith(_MACHINES)}
        self.environ = machine | {"HOME": str(folder), "PATH": f"{python}:/usr/local/bin:/usr/bin:/bin"}
        self.environ["REPOSITORY"] = str(ROOT)

    def type(self, lines: list[str], place: str = ".") -> dict[str, str]:
        """Type the lines one after the other, until one fails. Return each one's output, and print its time."""
        script = ["set -euo pipefail", f"cd {place}"]
        for number, line in enumerate(lines):
            script += [f"printf '\\n== {number} %s\\n' $SECONDS", line]
        script += ["printf '\\n== end %s\\n' $SECONDS"]
        shell = subprocess.Popen(
            ["bash", "-c", "\n".join(script)],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = shell.communicate(timeout=_BOUND_S)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            output, _ = shell.communicate()
        parts = re.split(r"\n== (?:\d+|end) (\d+)\n", output)[1:]
        starts, texts = [int(second) for second in parts[::2]], parts[1::2]
        for line, start, end in zip(lines, starts, starts[1:], strict=False):
            print(f"{end - start:5d} s  {line}")
        assert shell.returncode == 0, f"this failed: {lines[min(len(starts), len(lines)) - 1]}\n{output[-4000:]}"
        return dict(zip(lines, texts, strict=False))


@pytest.fixture(scope="module")
def clone() -> Iterator[Stranger]:
    with tempfile.TemporaryDirectory(prefix="stranger-") as folder:
        yield Stranger(Path(folder))


@pytest.fixture
def wheel(clone: Stranger) -> Iterator[Stranger]:
    """Another stranger, who has got the wheel that a clone has built."""
    if not (clone.folder / "rollout-gateway").is_dir():  # the test of the clone was left out
        clone.type(commands(QUICKSTART, CLONE))
    clone.type(["make dist"], "rollout-gateway")
    with tempfile.TemporaryDirectory(prefix="stranger-") as folder:
        (built,) = (clone.folder / "rollout-gateway" / "dist").glob("*.whl")
        built.rename(Path(folder) / built.name)
        yield Stranger(Path(folder))


def go_through(stranger: Stranger, install: str, home: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Install, start a fleet, complete, look, stop it. The clock goes to the terminal."""
    with capsys.disabled():
        print(f"\n{install}: the quickstart in an empty home")
        try:
            output = stranger.type([*commands(QUICKSTART, install, *USE)])
        finally:
            subprocess.run(
                ["bash", "-c", f"cd {home} && .venv/bin/rollout-gateway down"],
                cwd=stranger.folder,
                env=stranger.environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_BOUND_S,
            )
    status, completion, trace, down = list(output.values())[-4:]
    assert "replicas of engine:     2 RUNNING" in status
    (choice,) = json.loads(completion[completion.index('{"') :])["choices"]
    assert choice["message"]["content"].startswith("123")
    assert [span["version"] for span in choice["weight_versions"]] == [0]
    assert json.loads(trace)["request_id"] == "mine"
    assert down.endswith("rollout-gateway is down\n")
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen("http://127.0.0.1:8100/health", timeout=5)


@pytest.mark.slow
def test_a_stranger_with_a_clone_gets_to_a_completion(clone: Stranger, capsys: pytest.CaptureFixture[str]) -> None:
    go_through(clone, CLONE, "rollout-gateway", capsys)


@pytest.mark.slow
def test_a_stranger_with_a_wheel_gets_to_a_completion(wheel: Stranger, capsys: pytest.CaptureFixture[str]) -> None:
    go_through(wheel, WHEEL, ".", capsys)
