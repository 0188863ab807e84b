"""Light stays light: what a trainer or a shell imports must not pull in what a server runs on."""

import ast
import json
import subprocess
import sys
from pathlib import Path

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


ROOT = Path(__file__).parents[1]
LINES = {
    "gateway": 14009,
    "gateway/agents": 2263,
    "engines": 10598,
    "trainer_client": 2349,
    "sim": 2063,
    "tuning": 5104,
    "loadtests": 7043,
    "trainer_client/sessions": 591,
    "loadtests/sessions": 561,
}
"""The most lines of Python of each package, without those of a room named by itself. A change raises none."""
ATTRIBUTES = {
    "gateway/fleet/replica.py:Replica": 24,
    "gateway/weights/updates/record.py:UpdateRecord": 19,
    "gateway/fleet/placement/routing.py:Rollout": 18,
}
"""The most attributes of the classes that every flag would like to join: a new one takes the place of another."""


@pytest.mark.parametrize("package", LINES)
def test_a_package_only_shrinks(package: str) -> None:
    inside = [ROOT / other for other in LINES if other.startswith(f"{package}/")]
    files = [path for path in (ROOT / package).rglob("*.py") if not any(map(path.is_relative_to, inside))]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= LINES[package]


@pytest.mark.parametrize("place", ATTRIBUTES)
def test_a_class_takes_a_new_attribute_in_place_of_another(place: str) -> None:
    file, _, name = place.partition(":")
    assert len(attributes(ROOT / file, name)) <= ATTRIBUTES[place]


def attributes(file: Path, name: str) -> set[str]:
    """The names that a class sets on its objects, or declares as fields."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    fields = {
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return fields | {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
