"""The commands that this package adds to `rollout-gateway`, by its entry point.

plan, tune, doctor: choose engines for GPUs; measure levers; find mistakes in configurations.
"""

import typer

from gateway.cli.options import OVERRIDES, WITH_OVERRIDES
from tuning.doctor.command import doctor_command
from tuning.plan.command import EXAMPLE_SHAPE, plan_command
from tuning.tune.command import tune_command


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("plan", rich_help_panel="Tune", epilog=f"rollout-gateway plan --shape {EXAMPLE_SHAPE}")(plan_command)
    for name, command in (("tune", tune_command), ("doctor", doctor_command)):
        app.command(name, rich_help_panel="Tune", context_settings=WITH_OVERRIDES, epilog=OVERRIDES)(command)
