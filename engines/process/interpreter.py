"""The Python that runs an engine, ours or another environment's: what it has installed, and what it says when asked."""

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.config import EngineConfig
from engines.errors import ConfigError

# Looking up versions takes a tenth of a second; on a busy machine and a slow file system many of them.
_VERSIONS_TIMEOUT_S = 60.0

_ASK_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """`path` is the executable, `environ` the whole environment that the engine will have."""

    path: str
    environ: Mapping[str, str]

    @property
    def is_ours(self) -> bool:
        """Whether it finds the packages that this process finds."""
        return self.path == sys.executable and self.environ.get("PYTHONPATH") == os.environ.get("PYTHONPATH")

    def versions(self, *distributions: str) -> dict[str, str]:
        """Versions of those `distributions` that are installed. Blocks where it is another Python than ours.

        Raises `ConfigError` where it cannot be run.
        """
        if self.is_ours:
            return _own_versions(distributions)
        try:
            found: dict[str, str] = json.loads(self.last_line(_ASK_VERSIONS, _VERSIONS_TIMEOUT_S, *distributions))
        except OSError as error:
            raise ConfigError(
                f"engine.python = {self.path!r} cannot be run ({error.strerror}): name the python of the environment "
                "that has the engine, such as /opt/sglang/bin/python"
            ) from error
        except (ValueError, subprocess.SubprocessError) as error:
            raise ConfigError(f"engine.python = {self.path!r} is no Python that tells what it has: {error}") from error
        return found

    def last_line(self, script: str, timeout_s: float, *arguments: str) -> str:
        """The last line that `script` prints. Raises `OSError` or `SubprocessError` where it does not run well."""
        done = subprocess.run(
            [self.path, "-c", script, *arguments],
            env=dict(self.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        )
        return (done.stdout.strip().splitlines() or [""])[-1]


def interpreter_of(config: EngineConfig, env: Mapping[str, str] | None = None) -> Interpreter:
    """The Python of this engine group: `engine.python`, else ours. `env` is what we set for its engines."""
    return Interpreter(config.python or sys.executable, {**os.environ, **(env or {}), **config.env})


def _own_versions(distributions: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
