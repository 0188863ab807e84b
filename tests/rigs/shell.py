"""The command line as a shell runs it, in a process of its own or in that of the test."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.process.port import free_port
from gateway.cli import main as cli

SCRIPT = Path(sys.executable).with_name("rollout-gateway")
NAME = f"test-{os.getpid()}"
"""The application of a shell: another one's store, ledger and ports may be in use on this machine."""
SIM = "engine: {kind: sim, num_replicas: 2, num_cpus: 0.1}\ngateway: {port: 0}\nserve: {http_port: 0}\n"
_BOUND_S = 900.0  # a hang


class Shell:
    """Runs the console script in a folder of its own, with a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {
            **os.environ,
            "HOME": str(folder),
            "RAY_DASHBOARD_ADDRESS": "http://127.0.0.1:1",
            "ROLLOUT_GATEWAY_NAME": NAME,
        }
        self.environ.pop("XDG_STATE_HOME", None)
        (folder / "sim.yaml").write_text(SIM)

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [SCRIPT, *arguments],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=_BOUND_S,
            check=False,
        )


@contextlib.contextmanager
def clusterless(shell: Shell) -> Iterator[Shell]:
    """The shell where no Ray runs yet. What its `up` started is gone afterwards."""
    shell.environ["RAY_DASHBOARD_ADDRESS"] = f"http://127.0.0.1:{free_port()}"
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        shell.environ.pop(name, None)
    try:
        yield shell
    finally:
        shell.run("down")


class NearShell(Shell):
    """Calls what the console script calls in this process, as Python takes long to start."""

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        stdout, stderr, code = io.StringIO(), io.StringIO(), None
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for name in os.environ.keys() - self.environ.keys():
                patch.delenv(name)
            for name, value in self.environ.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", [str(SCRIPT), *arguments])
            patch.chdir(self.folder)
            stack.enter_context(contextlib.redirect_stdout(stdout))
            stack.enter_context(contextlib.redirect_stderr(stderr))
            try:
                cli.main()
            except SystemExit as exit_:
                code = exit_.code
        assert code is None or isinstance(code, int), "a text would be printed by Python"
        return subprocess.CompletedProcess(arguments, code or 0, stdout.getvalue(), stderr.getvalue())
