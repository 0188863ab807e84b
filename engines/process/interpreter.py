"""The Python that runs an engine, ours or another environment's, and its installed packages."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from engines.config import EngineConfig
from engines.errors import ConfigError

# Version lookup takes 0.1 s, and many times that on a busy machine with a slow file system.
_VERSIONS_TIMEOUT_S = 60.0


def _versions(distributions: list[str]) -> dict[str, str]:
    """Return versions of the installed ones. Another Python runs the source of this function: it needs no imports."""
    import importlib.metadata

    found = {}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class Interpreter:
    """`path` is the executable, `environ` the engine's complete environment."""

    path: str
    environ: Mapping[str, str]

    @property
    def is_ours(self) -> bool:
        """True if it finds the same packages as this process."""
        return self.path == sys.executable and self.environ.get("PYTHONPATH") == os.environ.get("PYTHONPATH")

    def versions(self, *distributions: str) -> dict[str, str]:
        """Return versions of the installed ones among `distributions`. Blocks for another Python than ours.

        Raises `ConfigError` if it cannot be run.
        """
        if self.is_ours:
            return _versions(list(distributions))
        script = f"{inspect.getsource(_versions)}\nimport json, sys\nprint(json.dumps(_versions(sys.argv[1:])))"
        try:
            done = subprocess.run(
                [self.path, "-c", script, *distributions],
                env=dict(self.environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_VERSIONS_TIMEOUT_S,
                check=True,
            )
            found: dict[str, str] = json.loads(done.stdout.strip().rpartition("\n")[2])
        except OSError as error:
            raise ConfigError(
                f"engine.python = {self.path!r} cannot be run ({error.strerror}): name the python of the environment "
                "that has the engine, such as /opt/sglang/bin/python"
            ) from error
        except (ValueError, subprocess.SubprocessError) as error:
            raise ConfigError(f"engine.python = {self.path!r} did not list its packages: {error}") from error
        return found


def interpreter_of(config: EngineConfig, env: Mapping[str, str] | None = None) -> Interpreter:
    """Return the Python of this engine group: `engine.python`, else ours. `env` are variables that we set for
    engines."""
    return Interpreter(config.python or sys.executable, {**os.environ, **(env or {}), **config.env})
