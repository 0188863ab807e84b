"""`rollout-gateway up` and `down`: a Ray head where none runs, the Serve application on it, and the way back."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engines.errors import DeadlineExceeded, RolloutGatewayError
from engines.process.diagnosis import last_error
from gateway.cli.progress import Report, starts_of
from gateway.cli.serve_api import ClusterRefused, ClusterSilent, ClusterUnreachable, ServeApi, ask_control_plane
from gateway.config.node_gpus import VISIBLE
from gateway.config.schema import Config
from gateway.config.serve_document import serve_config, written_out_keys

_RAY_START_TIMEOUT_S = 240.0
_TOKEN_TIMEOUT_S = 120.0
_RAY_STOP_TIMEOUT_S = 30.0
_DELETE_TIMEOUT_S = 120.0
# What placing replicas and Serve's own start may take on top of the engines' start.
DEPLOY_SLACK_S = 120.0
_POLL_S = 0.5
_STAY_POLL_S = 5.0
_STAY_SILENCE_S = 180.0
_RAY_GCS_PORT = 6379


class DeployFailed(RolloutGatewayError):
    """Serve gave the application up; says first what the engine said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An application that Serve knows. A URL is empty where it cannot be told."""

    status: str
    message: str
    rollout_url: str
    control_url: str
    replicas: dict[str, str]
    """Per deployment, how many replicas are in which state."""
    dashboard: str
    started_ray: bool


@dataclass(slots=True, kw_only=True)
class State:
    """What `down` must know of `up`, kept in a file. `ray_started_at` guards against a reused process id."""

    name: str
    dashboard: str
    ray_pid: int | None = None
    ray_started_at: int | None = None
    gpus: list[str] = field(default_factory=list)
    """Those that Ray was started with, where the user chose."""

    @staticmethod
    def folder(environ: Mapping[str, str] = os.environ) -> Path:
        base = environ.get("XDG_STATE_HOME")
        return (Path(base) if base else Path.home() / ".local" / "state") / "rollout-gateway"

    @classmethod
    def read(cls, name: str) -> "State | None":
        try:
            return cls(**json.loads((cls.folder() / f"{name}.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self) -> None:
        write_private(self.folder() / f"{self.name}.json", json.dumps(asdict(self)))

    def remove(self) -> None:
        for suffix in ("json", "inference_keys", "admin_keys"):
            (self.folder() / f"{self.name}.{suffix}").unlink(missing_ok=True)

    @property
    def ray_lives(self) -> bool:
        return self.ray_pid is not None and process_started_at(self.ray_pid) == self.ray_started_at


def up(config: Config, report: Report, timeout_s: float | None = None, gpus: Sequence[str] = ()) -> Running:
    """Start what is missing, deploy, and return when the application runs. A failure undoes what this call began.

    `gpus` are those of this node that Ray may give to engines; all where none are named. Raises `ClusterRefused` when
    a Ray runs already that was not started with them.
    """
    api = ServeApi.from_environment()
    state = State.read(config.name)
    if state is None or state.dashboard != api.address or not state.ray_lives:
        state = State(name=config.name, dashboard=api.address)
    is_new = False
    try:
        if api.is_up():
            _check_gpus(state, gpus)
        else:
            is_new = True
            state.gpus = list(gpus)
            _start_ray(state, api, report)
            api = ServeApi.from_environment()  # the token may be new
        before = api.application(config.name)
        is_new = before is None
        state.write()
        report.step("deploying")
        api.deploy(serve_config(config, _key_files(config)))
        _wait_until_running(api, config, before, report, timeout_s or _deploy_timeout_s(config))
        found = running(config.name)
        assert found is not None
        if not found.rollout_url:
            found = replace(found, rollout_url=_configured_url(config))
        _wait_until_ready(found, config.fleet.complete_within_s)
        return found
    except BaseException:  # Ctrl-C too: what never ran must not go on trying behind the user's back
        if is_new:
            _undo(config.name, report)
        raise


def down(name: str, report: Report) -> bool:
    """Remove the application, and Ray where `up` started it. False when there was nothing to remove."""
    api = ServeApi.from_environment()
    state = State.read(name)
    if state is None:
        return _delete(api, name, report)
    try:
        removed = _delete(replace(api, address=state.dashboard), name, report)
    except ClusterSilent:
        if not state.ray_lives:
            raise
        removed = False  # its Ray is ours, and takes the application along
    if state.ray_lives:
        report.step("stopping Ray")
        _stop_ray(state)
        removed = True
    state.remove()
    return removed


def stay(name: str, report: Report) -> None:
    """Wait until the application is gone or somebody ends us, and then take down what there is of it.

    Raises `ClusterUnreachable` or `ClusterSilent` when nothing was heard of its Ray for three minutes.
    """
    ended = threading.Event()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    heard = time.monotonic()
    try:
        while not ended.wait(_STAY_POLL_S):
            try:
                if running(name) is None:
                    report.step(f"{name} was taken down")
                    return
                heard = time.monotonic()
            except (ClusterUnreachable, ClusterSilent):
                if time.monotonic() - heard > _STAY_SILENCE_S:
                    raise
        down(name, report)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _undo(name: str, report: Report) -> None:
    report.step("undoing")
    try:
        down(name, report)
    except RolloutGatewayError as error:
        report.step(f"could not undo: {error}")


def _check_gpus(state: State, gpus: Sequence[str]) -> None:
    """A node's GPUs are fixed when its Ray starts, so others can be chosen only by starting it anew."""
    if not gpus or (state.ray_lives and state.gpus == list(gpus)):
        return
    chosen = ",".join(gpus)
    if state.ray_lives:
        has = f"with GPUs {','.join(state.gpus)}" if state.gpus else "with all GPUs of the node"
        remedy = f"rollout-gateway down --name {state.name}"
    else:
        has, remedy = "by somebody else", f"ray stop, or start it as {VISIBLE}={chosen} ray start --head"
    raise ClusterRefused(
        f"--gpus {chosen}: the Ray at {state.dashboard} was started {has}, and a running Ray keeps the GPUs it has; "
        f"first run: {remedy}"
    )


def _start_ray(state: State, api: ServeApi, report: Report) -> None:
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
    environ = _ray_environment() | ({VISIBLE: ",".join(state.gpus)} if state.gpus else {})
    log = State.folder() / f"{state.name}.ray.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # --block keeps one process that owns all others of this node, so that `down` ends these and no other Ray's.
    command = [_script("ray"), "start", "--head", "--block", "--disable-usage-stats", f"--port={_gcs_port()}"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={where.port or 80}"]
    command += [f"--num-gpus={len(state.gpus)}"] if state.gpus else []
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, start_new_session=True
        )
    state.ray_pid, state.ray_started_at = process.pid, process_started_at(process.pid)
    state.write()
    wait_until(lambda: _answers(process, api, log), _RAY_START_TIMEOUT_S, f"Ray to start; its output is in {log}")


def _answers(process: "subprocess.Popen[bytes]", api: ServeApi, log: Path) -> bool:
    if process.poll() is not None:
        text = log.read_text(errors="replace")
        last_words = textwrap.indent("\n".join(text.strip().splitlines()[-10:]), "    | ")
        raise RolloutGatewayError(
            f"ray start --head ended with exit code {process.returncode}: {last_error(text)}\n{last_words}"
        )
    try:
        return api.is_up()
    except ClusterSilent:  # it still starts
        return False


def _ray_environment() -> dict[str, str]:
    """Tokens on unless the user says otherwise: Ray listens on every interface, and runs code for whoever may ask."""
    environ = {"RAY_AUTH_MODE": "token", **os.environ}
    # `down` has removed the application before it stops Ray, so there is nothing to drain.
    environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
    if environ["RAY_AUTH_MODE"].lower() == "token":
        _run([_script("ray"), "get-auth-token", "--generate"], environ)
    return environ


def _gcs_port() -> int:
    """Ray's usual port, or 0 (a free one) where something else has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", _RAY_GCS_PORT))
        except OSError:
            return 0
    return _RAY_GCS_PORT


def _script(name: str) -> str:
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise RolloutGatewayError(f"{path} does not exist; install the extra: pip install 'rollout-gateway[serve]'")
    return str(path)


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


def _key_files(config: Config) -> dict[str, str]:
    """Keys travel to the builder in files that only this user reads; Serve shows their path and not them."""
    references = {}
    for name, keys in written_out_keys(config).items():
        path = State.folder() / f"{config.name}.{name}"
        references[name] = f"file:{path}"
        if keys:
            write_private(path, "\n".join(keys) + "\n")
    return references


def write_private(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _deploy_timeout_s(config: Config) -> float:
    return max(group.start_timeout_s for group in config.groups.values()) + DEPLOY_SLACK_S


def _wait_until_running(
    api: ServeApi, config: Config, before: Mapping[str, Any] | None, report: Report, timeout_s: float
) -> None:
    deployed_before = before["last_deployed_time_s"] if before else None
    seen: dict[str, Any] = {}

    def settled() -> bool:
        seen.update(api.application(config.name) or {})
        if not seen or seen["last_deployed_time_s"] == deployed_before:
            return False
        report.replicas(starts_of(seen, config.groups))
        if seen["status"] == "DEPLOY_FAILED":  # UNHEALTHY is not the end: Serve goes on restarting
            raise DeployFailed(last_words(seen) or f"Serve gave up on {config.name} and does not say why")
        return bool(seen["status"] == "RUNNING")

    try:
        wait_until(settled, timeout_s, "the application to run")
    except DeadlineExceeded as error:
        raise DeployFailed(f"{error}; Serve says: {describe(seen)} {last_words(seen)}") from error


def _wait_until_ready(found: Running, timeout_s: float) -> None:
    """Serve knows that the replicas run a moment before the gateway has met them. One that it refuses ends the wait."""
    url = found.control_url or found.rollout_url

    def met() -> bool:
        status = ask_control_plane(found.control_url, "/status") if found.control_url else None
        for replica_id, reason in (status or {}).get("replicas_refused", {}).items():
            raise DeployFailed(f"replica {replica_id} does not fit in: {reason}")
        return ask_control_plane(url, "/health") is not None

    wait_until(met, timeout_s, "the gateway to meet all replicas")


def describe(application: Mapping[str, Any]) -> str:
    """One line: each deployment with its replicas by state."""
    states = replica_states(application)
    return "  ".join(f"{name}: {text}" for name, text in states.items()) or str(application.get("status", "waiting"))


def replica_states(application: Mapping[str, Any]) -> dict[str, str]:
    """Deployment name -> such as "2 RUNNING" or "1 RUNNING, 1 STARTING"."""
    counted: dict[str, str] = {}
    for name, deployment in application.get("deployments", {}).items():
        states = [replica["state"] for replica in deployment["replicas"]]
        counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
        counted[name] = counts or str(deployment["status"])
    return counted


def last_words(application: Mapping[str, Any]) -> str:
    """What went wrong, by our own errors where there are any; else all that Serve says."""
    found = {name: deployment["message"] for name, deployment in application.get("deployments", {}).items()}
    messages = {"": application.get("message", ""), **found}
    own = [_own_error(message) for message in messages.values()]
    if any(own):
        return "\n".join(dict.fromkeys(text for text in own if text))
    plain = {name: re.sub(r"\x1b\[\d*m", "", message).strip() for name, message in messages.items()}
    return "\n".join(f"{name}: {text}" if name else text for name, text in plain.items() if text)


def _own_error(message: str) -> str:
    """Our own error out of the traceback that Serve wraps around it; "" where there is none."""
    found = list(re.finditer(r"^engines\.errors\.\w+: ", message, re.MULTILINE))
    return message[found[-1].end() :].strip() if found else ""


def running(name: str) -> Running | None:
    """The application as it is now; None when Serve does not know it."""
    state = State.read(name)
    api = ServeApi.from_environment()
    if state:
        api = replace(api, address=state.dashboard)
    details = api.details()
    application = details["applications"].get(name)
    if application is None:
        return None
    http = details["http_options"]
    control_url = f"http://{_reachable(http['host'])}:{http['port']}"
    if details["proxy_location"] == "Disabled":
        control_url = ""
    return Running(
        status=application["status"],
        message=last_words(application),
        rollout_url=(ask_control_plane(control_url, "/url") or {}).get("url", "") if control_url else "",
        control_url=control_url,
        replicas=replica_states(application),
        dashboard=api.address,
        started_ray=state is not None and state.ray_lives,
    )


def _configured_url(config: Config) -> str:
    """Where the control plane is off, or still has to come up. A port of 0 is known to the gateway alone."""
    return f"http://{_reachable(config.gateway.host)}:{config.gateway.port}" if config.gateway.port else ""


def _reachable(host: str) -> str:
    return socket.gethostname() if host in ("0.0.0.0", "::", "") else host


def _delete(api: ServeApi, name: str, report: Report) -> bool:
    try:
        if api.application(name) is None:
            return False
        report.step(f"removing {name}")
        api.delete(name)
        wait_until(lambda: api.application(name) is None, _DELETE_TIMEOUT_S, f"Serve to remove {name}")
    except ClusterUnreachable:
        return False
    return True


def _stop_ray(state: State) -> None:
    assert state.ray_pid is not None
    os.kill(state.ray_pid, signal.SIGTERM)
    try:
        wait_until(lambda: not state.ray_lives, _RAY_STOP_TIMEOUT_S, "Ray to stop")
    except DeadlineExceeded:
        os.killpg(state.ray_pid, signal.SIGKILL)


def process_started_at(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        # The second field is the command in parentheses, which may itself hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Raises `DeadlineExceeded` that says for what it waited."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(_POLL_S)
