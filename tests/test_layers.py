"""Light stays light: what a trainer or a shell imports must not pull in what a server runs on."""

import subprocess
import sys

import pytest

HEAVY = ("ray", "torch", "vllm", "sglang", "transformers")


@pytest.mark.parametrize("module", ["trainer_client", "gateway.api", "gateway.cli", "engines.types", "engines.errors"])
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_command_line_needs_no_package_of_the_serve_extra() -> None:
    extra = ("fastapi", "prometheus_client", "uvloop")
    code = f"import sys, gateway.cli; print([name for name in {extra} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
