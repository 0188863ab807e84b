"""Light stays light: what a trainer or a shell imports must not pull in what a server runs on."""

import json
import subprocess
import sys

import pytest

HEAVY = {"ray", "torch", "vllm", "sglang", "transformers"}
SERVE_EXTRA = {"fastapi", "prometheus_client", "uvloop"}
LIGHT = ("engines.errors", "engines.types", "gateway.api", "trainer_client", "gateway.cli.main")

_LOADED = """
import importlib, json, sys
modules, names = map(json.loads, sys.argv[1:])
loaded = {}
for module in modules:
    importlib.import_module(module)
    loaded[module] = [name for name in names if name in sys.modules]
print(json.dumps(loaded))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """The heavy packages loaded after each of LIGHT, imported one after another in their own process."""
    command = [sys.executable, "-c", _LOADED, json.dumps(LIGHT), json.dumps(sorted(HEAVY | SERVE_EXTRA))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_loads_nothing_heavy(loaded: dict[str, list[str]], module: str) -> None:
    assert HEAVY.intersection(loaded[module]) == set()


def test_the_command_line_needs_no_package_of_the_serve_extra(loaded: dict[str, list[str]]) -> None:
    assert SERVE_EXTRA.intersection(loaded["gateway.cli.main"]) == set()
