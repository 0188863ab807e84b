"""Writes the pins of requirements/ but those of torch-cpu.txt: with hashes, without paths and hosts."""

import os
import subprocess
import sys

from scripts import setup

UV = "uv==0.13.9"
SGLANG = "sglang==0.5.23"
SITE = "mkdocs-material==9.8.2"
VERL_BESIDE = "\n".join(["editables", "hatchling", "hypothesis", "pytest", "pytest-asyncio", "ray==2.60.0", "uvloop"])
PROJECT = setup.ENVIRONMENTS["project"]


def main() -> None:
    # What is excluded from cpu.txt is absent because its CUDA builds break vLLM's CPU build.
    _compile("pyproject.toml", *sys.argv[1:], output="cpu.txt", excludes="excludes.txt")
    # From sglang.txt, what GPUs alone need. SGLang asks for a torch of which there is no CPU build; it runs with ours.
    upgrade = [word for word in sys.argv[1:] if word == "--upgrade"]
    options = ["--override", "requirements/torch-cpu.txt", *upgrade]
    _compile(*options, "-", output="sglang.txt", excludes="sglang-excludes.txt", stdin=SGLANG)
    # verl's trainer, our packages beside it and what their tests want. It runs without the tracker that verl names.
    options = ["--override", "requirements/torch-cpu.txt", "--extra", "verl", *upgrade]
    _compile(*options, "pyproject.toml", "-", output="verl.txt", excludes="verl-excludes.txt", stdin=VERL_BESIDE)
    _compile("-", output="site.txt", excludes="excludes.txt", stdin=SITE)
    _compile("-", output="uv.txt", excludes="excludes.txt", stdin=UV)


def _compile(*arguments: str, output: str, excludes: str, stdin: str | None = None) -> None:
    # torch has a file of its own.
    options = ["--generate-hashes", "--no-emit-package", "torch", "--excludes", f"requirements/{excludes}"]
    options += ["--custom-compile-command", "make lock", "--output-file", f"requirements/{output}"]
    subprocess.run(
        [str(PROJECT.python), "-m", "uv", "pip", "compile", "-q", *options, *arguments],
        cwd=setup.ROOT,
        env={**os.environ, **setup.index_for_uv(PROJECT)},
        input=stdin,
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    main()
