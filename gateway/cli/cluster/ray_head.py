"""The Ray head that `up` starts where no Ray runs, and that `down` stops."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from engines.errors import DeadlineExceeded, RolloutGatewayError
from engines.process.diagnosis import last_error
from gateway.cli.cluster.progress import Report
from gateway.cli.cluster.serve_api import ClusterTroubled, ClusterUnreachable, ServeApi
from gateway.cli.cluster.state import State, process_started_at

_START_TIMEOUT_S = 240.0
_TOKEN_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0
_GCS_PORT = 6379
# Serve kills a proxy that is not ready after 5 s, which Ray's imports take on a busy machine, and its start then fails.
SERVE_ENVIRONMENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}


def start_ray(state: State, api: ServeApi, report: Report) -> None:
    """Start a Ray head, which has the GPUs of CUDA_VISIBLE_DEVICES, and note its process in `state`."""
    if os.environ.get("RAY_ADDRESS", "local") not in ("", "local", "auto"):
        raise ClusterUnreachable(
            f"RAY_ADDRESS names a cluster, but no Ray dashboard answers at {api.address}: set RAY_DASHBOARD_ADDRESS"
        )
    where = urlsplit(api.address)
    if where.hostname not in ("127.0.0.1", "localhost"):
        raise ClusterUnreachable(
            f"no Ray dashboard answers at {api.address}, and `up` starts Ray on this machine alone"
        )
    report.step("starting Ray")
    environ = _environment()
    log = State.folder() / f"{state.name}.ray.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # --block keeps one process that owns all others of this node, so that `down` ends these and no other Ray's.
    command = [*_ray(), "start", "--head", "--block", "--disable-usage-stats", f"--port={_gcs_port()}"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={where.port or 80}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, start_new_session=True
        )
    state.ray_pid, state.ray_started_at = process.pid, process_started_at(process.pid)
    state.write()
    report.wait_until(lambda: _answers(process, api, log), _START_TIMEOUT_S, f"Ray to start; its output is in {log}")


def stop_ray(state: State, report: Report) -> None:
    """Stop the Ray head that `up` started."""
    assert state.ray_pid is not None
    os.kill(state.ray_pid, signal.SIGTERM)
    try:
        report.wait_until(lambda: not state.ray_lives, _STOP_TIMEOUT_S, "Ray to stop")
    except DeadlineExceeded:
        os.killpg(state.ray_pid, signal.SIGKILL)


def _answers(process: "subprocess.Popen[bytes]", api: ServeApi, log: Path) -> bool:
    if process.poll() is not None:
        text = log.read_text(errors="replace")
        last_words = textwrap.indent("\n".join(text.strip().splitlines()[-10:]), "    | ")
        raise RolloutGatewayError(
            f"ray start --head ended with exit code {process.returncode}: {last_error(text)}\n{last_words}"
        )
    try:
        return api.is_up()
    except ClusterTroubled:  # it still starts
        return False


def _environment() -> dict[str, str]:
    """Tokens are on unless the user turns them off: Ray listens on every interface and runs anybody's code."""
    environ = {"RAY_AUTH_MODE": "token", **SERVE_ENVIRONMENT, **os.environ}
    # `down` has removed the application before it stops Ray, so there is nothing to drain.
    environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
    if environ["RAY_AUTH_MODE"].lower() == "token":
        _run([*_ray(), "get-auth-token", "--generate"], environ)
    return environ


def _gcs_port() -> int:
    """Return Ray's usual port, or 0 (a free one) where something else has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", _GCS_PORT))
        except OSError:
            return 0
    return _GCS_PORT


def _ray() -> list[str]:
    """Return the command `ray` of this Python, wherever it finds Ray."""
    if find_spec("ray") is None:
        raise RolloutGatewayError(
            f"{sys.executable} finds no Ray; install the extra: pip install 'rollout-gateway[serve]'"
        )
    return [sys.executable, "-m", "ray.scripts.scripts"]


def _run(command: list[str], environ: Mapping[str, str]) -> None:
    try:
        # The umask is for the token, which Ray would write for everyone to read.
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=False, timeout=_TOKEN_TIMEOUT_S, umask=0o077
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(f"{' '.join(command)} has not ended within {_TOKEN_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise RolloutGatewayError(f"{' '.join(command)} failed: {done.stderr.strip()[-1000:]}")
