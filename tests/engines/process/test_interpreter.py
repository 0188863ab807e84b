"""Another environment's Python tells what it has; one that cannot be run is told by name."""

import sys
from pathlib import Path

import pytest

from engines.config import EngineConfig
from engines.errors import ConfigError
from engines.process.interpreter import interpreter_of


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder with a package that this process does not find."""
    info = tmp_path / "site" / "sglang-1.2.3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 1.2.3\n")
    return info.parent


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Our Python under another name, as a virtual environment has it."""
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    return link


def test_what_the_engine_will_find_counts_and_not_what_we_find(elsewhere: Path, other: Path) -> None:
    config = EngineConfig(python=str(other), env={"PYTHONPATH": str(elsewhere)})
    assert interpreter_of(config).versions("sglang", "no-such-package") == {"sglang": "1.2.3"}


def test_a_path_of_its_own_makes_our_python_another(elsewhere: Path) -> None:
    assert interpreter_of(EngineConfig()).is_ours
    there = interpreter_of(EngineConfig(env={"PYTHONPATH": str(elsewhere)}))
    assert not there.is_ours
    assert there.versions("sglang") == {"sglang": "1.2.3"}


def test_a_python_that_fails_is_told() -> None:
    with pytest.raises(ConfigError, match=r"engine\.python = '/bin/false' did not list its packages"):
        interpreter_of(EngineConfig(python="/bin/false")).versions("sglang")
