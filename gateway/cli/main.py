"""The console script `rollout-gateway`: up, vllm-serve, down, scale, status, config, build. None of it imports ray."""

import json
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from engines.errors import ConfigError, GatewayUnreachable, RolloutGatewayError
from engines.store.peer_store import PeerStore
from engines.store.weight_store import remove_store
from gateway.cli.explanation import Explanation, explain_engines
from gateway.cli.progress import shown
from gateway.cli.scale import scale
from gateway.cli.serve_api import ask_control_plane
from gateway.cli.up import Running, down, running, stay, up
from gateway.cli.vllm_serve import HELP, read_command
from gateway.config.load import Setting, explain, load
from gateway.config.node_gpus import read_gpus
from gateway.config.schema import Config
from gateway.config.serve_document import ENVIRONMENT_REFERENCES, serve_config, written_out_keys
from gateway.tuning.doctor.finding import Severity
from gateway.tuning.doctor.live import look
from gateway.tuning.doctor.report import as_json as findings_as_json
from gateway.tuning.doctor.report import print_findings
from gateway.tuning.doctor.rules.all import examine
from gateway.tuning.doctor.subject import subject_of
from gateway.tuning.plan.command import plan_command
from gateway.tuning.tune.command import tune_command
from gateway.weights.snapshots import in_memory

DEFAULT_NAME = str(Config.model_fields["name"].default)

app = typer.Typer(
    help="One URL for RL rollouts: engine replicas on Ray Serve behind a gateway that keeps weights in step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(no_args_is_help=True, help="The configuration that file, environment and arguments make.")
app.add_typer(config_app, name="config")

# What follows the known options is `--engine.dtype float32`, `--engine.dtype=float32` or `engine.dtype=float32`.
WITH_OVERRIDES = {"ignore_unknown_options": True, "allow_extra_args": True}
_OVERRIDES = (
    "Any key can be given after the options: --engine.dtype float32, --engine.dtype=float32, engine.dtype=float32."
)

File = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML or TOML file, or a Serve deploy document.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[str, typer.Option("--name", help="Name of the Serve application.")]


app.command("plan")(plan_command)
app.command("tune", context_settings=WITH_OVERRIDES, epilog=_OVERRIDES)(tune_command)


def main() -> None:
    """Errors of this product are told on stderr without a traceback, with exit code 1; wrong usage exits with 2."""
    try:
        app()
    except RolloutGatewayError as error:
        print(f"rollout-gateway: {error}", file=sys.stderr)
        sys.exit(1)


@app.command("up", context_settings=WITH_OVERRIDES, epilog=_OVERRIDES)
def up_command(
    context: typer.Context,
    config: File = None,
    timeout_s: Annotated[float | None, typer.Option("--timeout-s", help="Longest wait for all replicas.")] = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", metavar="0,1", help="GPUs of this node for the engines; the trainer gets the others."),
    ] = None,
) -> None:
    """Start Ray if none runs, deploy, and return when every replica is ready."""
    chosen = read_gpus(gpus) if gpus is not None else ()
    with shown(Console(stderr=True)) as report:
        found = up(load(config, context.args), report, timeout_s, chosen)
    _print_running(found)


@app.command("vllm-serve", context_settings=WITH_OVERRIDES, add_help_option=False)
def vllm_serve_command(context: typer.Context) -> None:
    """Serve N vLLM replicas with the options of `trl vllm-serve`, until Ctrl-C."""
    if "--help" in context.args:
        print(HELP, end="")
        return
    asked = read_command(context.args)
    with shown(Console(stderr=True)) as report:
        found = up(asked.config, report, asked.timeout_s, asked.gpus)
    _print_running(found)
    if not asked.detach:
        with shown(Console(stderr=True)) as report:
            stay(asked.config.name, report)


@app.command("down")
def down_command(name: Name = DEFAULT_NAME, config: File = None) -> None:
    """Remove the application, and stop Ray where `up` started it."""
    name = load(config).name if config else name
    with shown(Console(stderr=True)) as report:
        removed = down(name, report)
        # Where the gateway ran on another node, its memory is freed by the next run there.
        remove_store(in_memory(name))
    print(f"{name} is down" if removed else f"nothing to do: {name} does not run")


@app.command("scale")
def scale_command(
    num_replicas: Annotated[int, typer.Argument(metavar="N", help="Replicas that the group is to have.")],
    group: Annotated[str | None, typer.Option("--group", help="Engine group, where there are several.")] = None,
    name: Name = DEFAULT_NAME,
    config: File = None,
    timeout_s: Annotated[float | None, typer.Option("--timeout-s", help="Longest wait for the replicas.")] = None,
) -> None:
    """Add or remove replicas while the others go on. Holds until the next `up`, which deploys what its file says."""
    name = load(config).name if config else name
    with shown(Console(stderr=True)) as report:
        found = scale(name, num_replicas, report, group, timeout_s)
    _print_running(found)


@app.command("fetch")
def fetch_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to make.")],
    url: Annotated[str, typer.Option("--url", envvar="ROLLOUT_URL", help="The gateway.")] = "http://127.0.0.1:8100",
    version: Annotated[
        int | None, typer.Option("--version", help="Weight version; the newest kept if left out.")
    ] = None,
    api_key: Annotated[str, typer.Option("--api-key", envvar="ROLLOUT_API_KEY", help="Admin key.")] = "",
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Longest wait.")] = 1800.0,
) -> None:
    """Copy a weight version from a gateway's store over HTTP, as a checkpoint folder: for evaluations, for machines
    that do not share the store."""
    if folder.exists():
        raise ConfigError(f"{folder} is there already: name a folder to make")
    peer = PeerStore(url, api_key)
    version = peer.newest() if version is None else version
    peer.fetch(version, folder.absolute(), timeout_s)
    print(f"version {version} is in {folder}")


@app.command("status")
def status_command(name: Name = DEFAULT_NAME, config: File = None, as_json: AsJson = False) -> None:
    """What Serve and the gateway say of every replica."""
    name = load(config).name if config else name
    found = running(name)
    if found is None:
        raise RolloutGatewayError(f"Serve knows no application {name}; start it with: rollout-gateway up -c FILE")
    fleet = ask_control_plane(found.control_url, "/status") if found.control_url else None
    if as_json:
        _print_json({"name": name, **asdict(found), "fleet": fleet})
        return
    _print_running(found)
    if fleet:
        _print_fleet(fleet)


@app.command("build", context_settings=WITH_OVERRIDES, epilog=_OVERRIDES)
def build_command(context: typer.Context, config: File = None) -> None:
    """Print the document that `serve deploy` takes."""
    built = load(config, context.args)
    for name, keys in written_out_keys(built).items():
        if keys:
            variable = ENVIRONMENT_REFERENCES[name].removeprefix("env:")
            print(f"gateway.{name} is left out; set {variable} where Ray is started", file=sys.stderr)
    print(yaml.safe_dump(serve_config(built), sort_keys=False, allow_unicode=True), end="")


@config_app.command("show", context_settings=WITH_OVERRIDES, epilog=_OVERRIDES)
def show_command(context: typer.Context, config: File = None, as_json: AsJson = False) -> None:
    """Every value, and where it came from. Keys are hidden."""
    settings = explain(config, context.args)
    if as_json:
        _print_json([asdict(setting) for setting in settings])
    elif sys.stdout.isatty():
        _print_table(["key", "value", "from"], [[s.key, _value(s), s.place or s.origin] for s in settings])
    else:
        for setting in settings:
            print(f"{setting.key}: {_value(setting)}  # {setting.place or setting.origin}")


@config_app.command("validate", context_settings=WITH_OVERRIDES, epilog=_OVERRIDES)
def validate_command(context: typer.Context, config: File = None, as_json: AsJson = False) -> None:
    """Say whether the configuration is right, and where it is not."""
    try:
        found = load(config, context.args)
    except ConfigError as error:
        if not as_json:
            raise
        _print_json({"valid": False, "errors": str(error).splitlines()})
        raise typer.Exit(1) from error
    groups = {name: group.num_replicas for name, group in found.groups.items()}
    if as_json:
        _print_json({"valid": True, "errors": [], "replicas": groups})
    else:
        print("valid: " + ", ".join(f"{name} x {count}" for name, count in groups.items()))


@config_app.command("explain", context_settings=WITH_OVERRIDES, epilog=_OVERRIDES)
def explain_command(context: typer.Context, config: File = None, as_json: AsJson = False) -> None:
    """The command line of each engine group, and which key and which place every argument comes from."""
    found = explain_engines(load(config, context.args), explain(config, context.args))
    if as_json:
        _print_json([asdict(one) for one in found])
        return
    for one in found:
        _print_explanation(one)


@config_app.command("schema")
def schema_command() -> None:
    """Print the JSON schema of the configuration, for editors."""
    _print_json(Config.model_json_schema())


@app.command("doctor", context_settings=WITH_OVERRIDES, epilog=_OVERRIDES)
def doctor_command(
    context: typer.Context,
    config: File = None,
    verl: Annotated[
        Path | None, typer.Option("--verl", metavar="FILE", help="verl: YAML, or a script with Hydra overrides.")
    ] = None,
    verl_version: Annotated[
        str, typer.Option("--verl-version", metavar="X.Y.Z", help="Release of verl; the newest known unless given.")
    ] = "",
    trl: Annotated[
        Path | None, typer.Option("--trl", metavar="FILE", help="TRL: YAML, JSON, or Python with a GRPOConfig(...).")
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="FILE", help="A verl configuration known to be good.")
    ] = None,
    url: Annotated[str, typer.Option("--url", metavar="URL", help="A running gateway's rollout URL.")] = "",
    key: Annotated[str, typer.Option("--key", help="Its key, as env:NAME or file:PATH.")] = "",
    trl_processes: Annotated[int, typer.Option("--trl-processes", min=1, help="Training processes of TRL.")] = 1,
    gpu_gib: Annotated[float, typer.Option("--gpu-gib", min=1, help="Memory of one GPU.")] = 80.0,
    show_all: Annotated[bool, typer.Option("--all", help="Show what is fine, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what in configurations costs speed, memory or truth. Exit code 1 when something hurts, 2 on bad input."""
    try:
        if not (config or context.args or verl or trl or url):
            raise ConfigError("nothing to examine: give -c FILE, --verl FILE, --trl FILE or --url URL")
        ours = config or context.args
        subject = subject_of(
            config=load(config, context.args) if ours else None,
            settings=explain(config, context.args) if ours else None,
            verl=verl,
            verl_version=verl_version,
            trl=trl,
            trl_processes=trl_processes,
            against=against,
            live=look(url, key) if url else None,
            gpu_gib=gpu_gib,
        )
    except (ConfigError, GatewayUnreachable) as error:
        print(f"rollout-gateway: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    findings = examine(subject)
    if as_json:
        _print_json(findings_as_json(findings))
    else:
        print_findings(Console(), findings, with_fine=show_all)
    if any(finding.severity is Severity.HURTS for finding in findings):
        raise typer.Exit(1)


def _print_running(found: Running) -> None:
    rows = {
        "application": found.status,
        "rollout URL": found.rollout_url or "unknown: the control plane does not answer",
        "control URL": found.control_url or "off (serve.proxy_location is Disabled)",
        "Ray dashboard": found.dashboard,
        **{f"replicas of {name}": text for name, text in found.replicas.items()},
    }
    if found.message:
        rows["message"] = found.message
    for name, value in rows.items():
        print(f"{name + ':':<24}{value}")


def _update(last: dict[str, Any]) -> str:
    """One line: what was done, what it cost, what the canary found."""
    found = Counter((replica.get("canary") or {}).get("result", "not asked") for replica in last["replicas"].values())
    steps = ", ".join(f"{step} {seconds:.3f}" for step, seconds in last["seconds"].items())
    way = f"{last['transport']}{', rolling,' * last['rolling']}"
    return (
        f"version {last['version']} {last['end']} over {way} in {last['age_s']:.3f} s ({steps}), "
        f"{last['bytes'] / 1e6:.1f} MB, canary: {', '.join(f'{n} {result}' for result, n in found.items()) or 'none'}"
        + (f"; {last['error']}" if last["error"] else "")
    )


def _print_fleet(fleet: dict[str, Any]) -> None:
    print(f"{'policy:':<24}{fleet['policy'] or 'none: every model is frozen'}")
    print(f"{'weight version:':<24}{fleet['weight_version']}")
    if reason := fleet["weight_store"]["reason"]:
        print(f"{'no weight store:':<24}{reason}")
    if update := fleet["weight_update"]:
        there = sum(replica["weight_version"] == update["version"] for replica in fleet["replicas"])
        step = f"{update['phase']}, {there} replicas hold it, {update['age_s']:.1f} s"
        print(f"{'update under way:':<24}version {update['version']} {step}")
    if last := fleet["last_weight_update"]:
        print(f"{'last update:':<24}{_update(last)}")
    for adapter in fleet["adapters"]:
        held = f"version {adapter['version']}, on {len(adapter['replicas'])} replicas, {adapter['rollouts']} rollouts"
        print(f"{'LoRA adapter:':<24}{adapter['name']}: {held}, from {adapter['path']}")
    for replica_id, reason in fleet["replicas_refused"].items():
        print(f"{'refused:':<24}{replica_id}: {reason}")
    columns = ["replica_id", "model", "state", "weight_version", "samples_in_flight", "gpu_ids", "reason", "url"]
    rows = [[_cell(replica, column) for column in columns] for replica in fleet["replicas"]]
    _print_table([column.replace("_", " ") for column in columns], rows)


def _cell(replica: dict[str, Any], column: str) -> str:
    return f"{replica[column]}{' (frozen)' if column == 'model' and replica['frozen'] else ''}"


def _print_explanation(one: Explanation) -> None:
    print(f"{one.group}: {one.num_replicas} x {one.kind}" + (f" at {one.url}" if one.url else ""))
    if not one.command:
        print("  nothing is started\n")
        return
    print(f"  {shlex.join(one.command)}\n")
    rows = [[part.text, part.key, part.place or part.origin] for part in (*one.arguments, *one.environment)]
    _print_table(["argument or variable", "key", "from"], rows)
    print()


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=250)  # a pipe has no width to fold at
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False)


def _value(setting: Setting) -> str:
    return setting.value if isinstance(setting.value, str) else json.dumps(setting.value)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


if __name__ == "__main__":
    main()
