"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from gateway.config.sources import PREFIX

# Words after the known options are overrides.
WITH_OVERRIDES = {"ignore_unknown_options": True, "allow_extra_args": True}
OVERRIDES = (
    "Any key can be given after the options: --engine.dtype float32, --engine.dtype=float32, engine.dtype=float32."
)

File = Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[
    str, typer.Option("--name", envvar=f"{PREFIX}NAME", show_envvar=False, help="Name of the Serve application.")
]
TimeoutS = Annotated[float | None, typer.Option("--timeout-s", min=0, help="Longest wait for all replicas.")]
