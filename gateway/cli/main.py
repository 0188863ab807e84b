"""The console script `rollout-gateway`. Nothing here imports ray.

Packages add commands by the entry point `rollout_gateway.commands`, a function that is given the application.
"""

import json
import re
import shutil
import sys
from collections import deque
from dataclasses import asdict
from importlib.metadata import entry_points, version
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
import yaml

from engines.errors import RolloutGatewayError, UsageError
from engines.process.log_lines import write_log_lines
from gateway.cli.cluster.application import logs_and_events, running, unknown_application
from gateway.cli.cluster.progress import Report
from gateway.cli.cluster.serve_api import ask_control_plane
from gateway.cli.down import down
from gateway.cli.options import OVERRIDES, WITH_OVERRIDES, AsJson, File, Name, TimeoutS
from gateway.cli.output import print_events, print_fleet, print_json, print_running
from gateway.cli.up import up
from gateway.config.load import explain, load
from gateway.config.machine import lacks, missing_keys
from gateway.config.schema import Config
from gateway.config.serve_document import serve_config

RUN, LOOK = "Run", "Look"
DEFAULT_NAME = str(Config.model_fields["name"].default)

app = typer.Typer(
    help="One URL for RL rollouts: engine replicas on Ray Serve behind a gateway that keeps weights in step.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(no_args_is_help=True, help="The configuration from file, environment and arguments.")
app.add_typer(config_app, name="config", rich_help_panel=RUN)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rollout-gateway {version('rollout-gateway')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Print our own errors on stderr without a traceback. Exit with 1 where a command cannot do it or has failed, with
    2 where its words are wrong, and with 130 after Ctrl-C."""
    write_log_lines(sys.stderr)
    try:
        app()
    except RolloutGatewayError as error:
        print(f"rollout-gateway: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


@app.command("up", rich_help_panel=RUN, context_settings=WITH_OVERRIDES, epilog=OVERRIDES)
def up_command(
    context: typer.Context,
    config: File = None,
    timeout_s: TimeoutS = None,
) -> None:
    """Start Ray if none runs, deploy, and return when every replica is ready."""
    report = Report()
    report.step("reading the configuration")  # first: what follows takes seconds on a busy machine
    print_running(up(load(config, context.args), report, timeout_s))


@app.command("down", rich_help_panel=RUN)
def down_command(name: Name = DEFAULT_NAME) -> None:
    """Remove the application, and stop Ray where `up` started it."""
    removed = down(name, Report())
    print(f"{name} is down" if removed else f"nothing to do: {name} does not run")


@app.command("status", rich_help_panel=LOOK)
def status_command(name: Name = DEFAULT_NAME, as_json: AsJson = False) -> None:
    """Report replicas, weights and updates."""
    found = running(name)
    if found is None:
        raise unknown_application(name)
    fleet = ask_control_plane(found.control_url, "/status")
    if as_json:
        print_json({"name": name, **asdict(found), "fleet": fleet or None})
        return
    print_running(found)
    if fleet:
        print_fleet(fleet)


@app.command("logs", rich_help_panel=LOOK)
def logs_command(
    replica: Annotated[
        str, typer.Argument(metavar="REPLICA", help="Label of a replica, or beginning of an id; all if left out.")
    ] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Lines from the end of each log.")] = 20,
    name: Name = DEFAULT_NAME,
) -> None:
    """Print the ends of the engines' logs on this machine, of engines that failed too, and the gateway's events."""
    logs, events = logs_and_events(name, replica)
    for log in logs:
        print(f"==> {log} <==")
        with log.open(encoding="utf-8", errors="replace") as file:
            print("".join(deque(file, maxlen=lines)).rstrip())
    print_events(events)


@app.command("build", rich_help_panel=RUN, context_settings=WITH_OVERRIDES, epilog=OVERRIDES)
def build_command(context: typer.Context, config: File = None) -> None:
    """Print the document that `serve deploy` takes."""
    print(yaml.safe_dump(serve_config(load(config, context.args)), sort_keys=False, allow_unicode=True), end="")


@app.command("example", rich_help_panel=RUN)
def example_command() -> None:
    """Write the package's examples below ./examples, and list them. Files that are there stay."""
    package, mine = Path(str(files("gateway"))), Path("examples")
    # The wheel has them inside the package, a checkout beside it.
    root = next(folder for folder in (package / "examples", package.parent / "examples") if folder.is_dir())

    def copied(source: str, target: str) -> None:
        if not Path(target).exists():
            shutil.copy(source, target)

    shutil.copytree(root, mine, ignore=shutil.ignore_patterns("__pycache__"), copy_function=copied, dirs_exist_ok=True)
    for path in sorted(root.rglob("*")):
        if path.suffix in (".yaml", ".py", ".sh"):
            print(f"{mine / path.relative_to(root)!s:<48} {_title(path)}")


def _title(path: Path) -> str:
    """Return the first words of an example."""
    lines = [line.lstrip('# "') for line in path.read_text(encoding="utf-8").splitlines()]
    return re.split(r"[.:,;](?:\s|$)", next((line for line in lines if line and not line.startswith("!")), ""))[0]


@config_app.command("show", context_settings=WITH_OVERRIDES, epilog=OVERRIDES)
def show_command(context: typer.Context, config: File = None) -> None:
    """Print every value and its source. Keys are hidden."""
    for setting in explain(config, context.args):
        value = setting.value if isinstance(setting.value, str) else json.dumps(setting.value)
        print(f"{setting.key}: {value}  # {setting.place or setting.origin}")


@config_app.command("validate", context_settings=WITH_OVERRIDES, epilog=OVERRIDES)
def validate_command(context: typer.Context, config: File = None) -> None:
    """Check the configuration: report each mistake with its place, and needs that this machine cannot meet.

    Exit code 1 for either."""
    found = load(config, context.args)
    print("valid: " + ", ".join(f"{name} x {group.num_replicas}" for name, group in found.groups.items()))
    if lacking := [*lacks(found), *missing_keys(found)]:
        for line in lacking:
            print(f"cannot run on this machine: {line}")
        raise typer.Exit(1)


@config_app.command("schema")
def schema_command() -> None:
    """Print the JSON schema of the configuration, for editors."""
    print_json(Config.model_json_schema())


for plugin in entry_points(group="rollout_gateway.commands"):
    plugin.load()(app)


if __name__ == "__main__":
    main()
