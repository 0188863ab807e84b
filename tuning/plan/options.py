"""Options that describe a batch, the same for `plan` and `tune`."""

from typing import Annotated

import typer

from tuning.plan.workload import Lengths, StepWorkload

BATCH = "The batch"

Samples = Annotated[int, typer.Option("--samples", "-n", help="Samples of a prompt.", rich_help_panel=BATCH)]
PromptLengths = Annotated[
    str, typer.Option("--prompt", metavar="MEAN[:MAX]", help="Tokens of a prompt.", rich_help_panel=BATCH)
]
ResponseLengths = Annotated[
    str, typer.Option("--response", metavar="MEAN[:MAX]", help="Tokens of a completion.", rich_help_panel=BATCH)
]


def step_of(prompts: int, samples: int, prompt: str, response: str) -> StepWorkload:
    """The step that the options describe. Raises `ConfigError` naming the option at fault."""
    return StepWorkload(
        prompts=prompts,
        samples=samples,
        prompt=Lengths.parse(prompt, "--prompt"),
        response=Lengths.parse(response, "--response"),
    )
