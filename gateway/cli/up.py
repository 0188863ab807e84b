"""`rollout-gateway up`: a Ray head where none runs, and the Serve application on it."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from engines.errors import ConfigError, RolloutGatewayError
from gateway.cli.cluster.application import Running, met_by_the_gateway, wait_for_serve
from gateway.cli.cluster.changes import changes, has_running_engine, scaled
from gateway.cli.cluster.progress import Report
from gateway.cli.cluster.ray_head import start_ray
from gateway.cli.cluster.serve_api import ClusterRefused, ServeApi
from gateway.cli.cluster.state import State, changing
from gateway.cli.down import delete, down
from gateway.config.machine import lacks, misplaced, missing_keys
from gateway.config.schema import Config
from gateway.config.serve_document import config_of, serve_config

# Time for placing replicas and for Serve's own start, on top of the engines' start.
_DEPLOY_SLACK_S = 120.0


def up(config: Config, report: Report, timeout_s: float | None = None) -> Running:
    """Start what is missing, deploy, and return when the application runs. A failure undoes what this call began.

    Raises `ConfigError`, and changes nothing, where the configuration cannot run here, and `ClusterRefused` where a
    running Ray has another application in this one's place.
    """
    with changing(config.name, "up"):
        longest_s = max(group.start_timeout_s for group in config.groups.values()) + _DEPLOY_SLACK_S
        return _up(config, report, timeout_s or longest_s)


def _up(config: Config, report: Report, timeout_s: float) -> Running:
    api, document = ServeApi.from_environment(), serve_config(config)
    state = _state(config.name, api)
    is_new, before = False, None
    try:
        if api.is_up():
            _check_cluster(config, api)
        else:
            _refuse([*lacks(config), *missing_keys(config), *unbindable(config)])
            is_new = True
            start_ray(state, api, report)
            api = ServeApi.from_environment()  # the token may be new
        before = _application_before(api, config.name, report)
        is_new = before is None
        state.write()
        _deploy(api, document, before, report)
        wait_for_serve(api, config, before, report, timeout_s)
        return met_by_the_gateway(config, report)
    except BaseException:  # Ctrl-C too: an application that never ran must not go on trying in the background
        if is_new:
            _undo(config.name, report)
        elif before is not None:
            report.note("`rollout-gateway status` tells what serves now; `up` with the file of before brings that back")
        raise


def _check_cluster(config: Config, api: ServeApi) -> None:
    """Raise `ConfigError` where the running Ray cannot run the configuration. Nothing is changed yet.

    Files and ports of other machines are not seen from here.
    """
    nodes, details, cpus = api.nodes(), api.details(), misplaced(config, api.nodes("CPU"), "CPU")
    # A forwarded port makes any cluster's dashboard look local.
    if any(error for address, _ in nodes for error in _failures("", address, "", 0)):
        _refuse([*misplaced(config, nodes), *cpus])
        return
    deployed = (details["applications"].get(config.name) or {}).get("deployed_app_config")
    serve_port = details.get("http_options", {}).get("port")  # none before Serve has run
    ports = unbindable(config, config_of(deployed).gateway.port if deployed else None, serve_port)
    _refuse([*lacks(config, gpus=sum(gpus for _, gpus in nodes)), *cpus, *ports])


def unbindable(config: Config, gateway_port: int | None = None, serve_port: int | None = None) -> list[str]:
    """List the addresses of the gateway and of Serve's proxy that cannot be bound, with the remedy: Serve would find
    them after its start alone. A running gateway has `gateway_port` already, and a running Serve `serve_port`."""
    gateway, serve = config.gateway, config.serve
    found: list[str] = []
    if gateway.port != gateway_port:
        found += _failures("gateway.host", gateway.host, "gateway.port", gateway.port)
    if serve.proxy_location != "Disabled" and serve.http_port != serve_port:
        found += _failures("serve.http_host", serve.http_host, "serve.http_port", serve.http_port)
    return found


def _failures(host_key: str, host: str, port_key: str, port: int) -> Iterator[str]:
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with closing(socket.socket(family, kind)) as probe:
                # As servers do it: an address whose last connections have just been closed is free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        yield (
            f"{host_key} = {host!r}, {port_key} = {port}: cannot be bound here ({error.strerror}): "
            f"set another {port_key} or {host_key}, or end the process that listens there"
        )


def _refuse(reasons: Sequence[str]) -> None:
    if reasons:
        raise ConfigError("\n".join([*reasons, "nothing was started or stopped"]))


def _state(name: str, api: ServeApi) -> State:
    """Return the record of an earlier `up` where its Ray lives on, else a new one."""
    state = State.read(name)
    if state is None or not state.ray_lives:
        return State(name=name, dashboard=api.address)
    if state.dashboard != api.address:
        raise ClusterRefused(
            f"{name} is up already, on the Ray at {state.dashboard}, and another gateway of that name on this machine "
            f"would share its weight store: set another `name`, or first run: rollout-gateway down --name {name}"
        )
    return state


def _application_before(api: ServeApi, name: str, report: Report) -> dict[str, Any] | None:
    """Return the application that runs already. One without a running engine is removed first: Serve would count the
    failures of its replicas against their successors."""
    applications = api.details()["applications"]
    for other, found in applications.items():
        if other != name and found.get("route_prefix") == "/":
            raise ClusterRefused(
                f"the Ray at {api.address} serves the application {other!r} at /, and has room for one gateway's "
                f"control plane: first run `rollout-gateway down --name {other}`, or give {name!r} a Ray of its own "
                "with RAY_DASHBOARD_ADDRESS=http://127.0.0.1:8266, gateway.port and serve.http_port"
            )
    before: dict[str, Any] | None = applications.get(name)
    if before is None or has_running_engine(before):
        return before
    report.note(f"{name} has no running engine ({before['status']}): removing it before it is deployed again")
    delete(api, name, before, report)
    return None


def _deploy(api: ServeApi, document: Mapping[str, Any], before: Mapping[str, Any] | None, report: Report) -> None:
    deployed = before and before.get("deployed_app_config")
    found = changes(deployed, document["applications"][0]) if deployed else None
    if found is not None:
        report.note(str(found))
    report.step("deploying")
    if before is None or deployed is None or found is None or found.keys or not before["deployments"]:
        api.deploy(document["applications"][0], document)
        return
    for group, (_, number) in found.replicas.items():
        deployed = scaled(deployed, group, number)
    api.deploy(deployed)


def _undo(name: str, report: Report) -> None:
    report.step("undoing")
    try:
        down(name, report)
    except RolloutGatewayError as error:
        report.step(f"could not undo: {error}")
