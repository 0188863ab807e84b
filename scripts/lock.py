"""Writes requirements/cpu.txt and uv.txt: every pin with the hashes of all its files, and no paths or hosts."""

import os
import subprocess
import sys

import setup

UV = "uv==0.13.9"


def main() -> None:
    environment = {**os.environ, **setup.index_for_uv()}
    _compile(environment, "pyproject.toml", *sys.argv[1:], output="cpu.txt")
    _compile(environment, "-", output="uv.txt", stdin=UV)


def _compile(environment: dict[str, str], *arguments: str, output: str, stdin: str | None = None) -> None:
    # torch has a file of its own; what requirements/excludes.txt names is absent because its CUDA builds break vLLM's.
    options = ["--generate-hashes", "--no-emit-package", "torch", "--excludes", "requirements/excludes.txt"]
    options += ["--custom-compile-command", "make lock"]
    subprocess.run(
        [".venv/bin/uv", "pip", "compile", "-q", *options, "--output-file", f"requirements/{output}", *arguments],
        cwd=setup.ROOT,
        env=environment,
        input=stdin,
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    main()
