"""The verb `rollout-gateway doctor`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engines.errors import UsageError
from gateway.cli.options import AsJson, File
from gateway.cli.output import print_json
from gateway.config.load import explain, load
from tuning.doctor.finding import Severity
from tuning.doctor.live import watch as watch_live
from tuning.doctor.patch import patch_of
from tuning.doctor.report import as_json as findings_as_json
from tuning.doctor.report import print_findings
from tuning.doctor.rules.all import examine
from tuning.doctor.subject import subject_of
from tuning.duration import seconds_of


def doctor_command(
    context: typer.Context,
    config: File = None,
    verl: Annotated[
        Path | None, typer.Option("--verl", metavar="FILE", help="verl: YAML, or a script with Hydra overrides.")
    ] = None,
    trl: Annotated[
        Path | None,
        typer.Option(
            "--trl", metavar="FILE", help="TRL: YAML, JSON, Python with a plain GRPOConfig(...), or a script."
        ),
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="FILE", help="A verl configuration known to be good.")
    ] = None,
    url: Annotated[str, typer.Option("--url", metavar="URL", help="A running gateway's rollout URL.")] = "",
    key: Annotated[str, typer.Option("--key", help="Its key, as env:NAME or file:PATH.")] = "",
    watch: Annotated[
        str, typer.Option("--watch", metavar="TIME", help="With --url: count over this time, such as 30s.")
    ] = "",
    trl_processes: Annotated[
        int | None, typer.Option("--trl-processes", min=1, help="Training processes of TRL.")
    ] = None,
    gpu_gib: Annotated[float, typer.Option("--gpu-gib", min=1, help="Memory of one GPU.")] = 80.0,
    fix: Annotated[bool, typer.Option("--fix", help="Print a patch that renames what verl renamed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find settings that cost speed, memory or correctness. Exit code 1 if problems are found."""
    if not (config or context.args or verl or trl or url):
        raise UsageError("nothing to examine: give -c FILE, --verl FILE, --trl FILE or --url URL")
    if watch and not url:
        raise UsageError(f"--watch {watch}: nothing to watch: give --url URL")
    ours = config or context.args
    subject = subject_of(
        config=load(config, context.args) if ours else None,
        settings=explain(config, context.args) if ours else None,
        verl=verl,
        trl=trl,
        trl_processes=trl_processes,
        against=against,
        live=watch_live(url, key, seconds_of(watch, "--watch") if watch else 0) if url else None,
        gpu_gib=gpu_gib,
    )
    findings = examine(subject)
    if as_json:
        print_json(findings_as_json(findings))
    elif fix:
        print(patch_of(findings), end="")
    else:
        print_findings(Console(), findings)
    if any(finding.severity is Severity.HURTS for finding in findings):
        raise typer.Exit(1)
