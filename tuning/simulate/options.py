"""Options of `rollout-gateway simulate` that describe workloads and engines."""

from typing import Annotated

import typer

from tuning.plan.options import BATCH

ENGINES = "The engines"
AGENTS = "Agents"

Gpu = Annotated[
    str, typer.Option("--gpu", help="H200, H100, A100, ..., or numbers, as in plan.", rich_help_panel=ENGINES)
]
Shape = Annotated[
    str,
    typer.Option(
        "--shape", metavar="KEY=VALUE,...", help="The model, in config.json's words.", rich_help_panel=ENGINES
    ),
]
KvRead = Annotated[
    float,
    typer.Option(
        "--kv-read-s", min=0, help="kind: sim: seconds of a step for each token it looks at.", rich_help_panel=ENGINES
    ),
]
Prompts = Annotated[int, typer.Option("--prompts", min=1, help="Prompts of a batch.", rich_help_panel=BATCH)]
Sigma = Annotated[
    float, typer.Option("--sigma", min=0, help="Deviation of the logarithm of lengths.", rich_help_panel=BATCH)
]
Batches = Annotated[int, typer.Option("--batches", min=1, help="Batches of an epoch, in turn.", rich_help_panel=BATCH)]
Epochs = Annotated[int, typer.Option("--epochs", min=1, help="Epochs over the same prompts.", rich_help_panel=BATCH)]
Pool = Annotated[
    int,
    typer.Option(
        "--pool",
        min=0,
        help="Run with a pool of so many groups, too: a batch takes the first --prompts of them to end.",
        rich_help_panel=BATCH,
    ),
]
MaxStaleness = Annotated[
    int,
    typer.Option(
        "--max-staleness",
        min=0,
        help="Batches of a pool wait for groups that began so many batches before; 0 is no bound.",
        rich_help_panel=BATCH,
    ),
]
Sessions = Annotated[
    int, typer.Option("--sessions", min=1, help="Live sessions for each replica.", rich_help_panel=AGENTS)
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Sessions of a user, in turn.", rich_help_panel=AGENTS)]
Turns = Annotated[int, typer.Option("--turns", min=1, help="Mean turns of a session.", rich_help_panel=AGENTS)]
First = Annotated[
    str, typer.Option("--first", metavar="MEAN[:MAX]", help="Tokens of a first prompt.", rich_help_panel=AGENTS)
]
Turn = Annotated[
    str, typer.Option("--turn", metavar="MEAN[:MAX]", help="Tokens of a turn's completion.", rich_help_panel=AGENTS)
]
Tool = Annotated[
    str, typer.Option("--tool", metavar="MEAN[:MAX]", help="Tokens that a tool adds.", rich_help_panel=AGENTS)
]
ToolSeconds = Annotated[float, typer.Option("--tool-s", min=0, help="Mean seconds of a tool.", rich_help_panel=AGENTS)]
ReportsEnds = Annotated[
    bool,
    typer.Option("--finish", help="Agents report ends: POST /v1/sessions/ID/finish.", rich_help_panel=AGENTS),
]
MaxContext = Annotated[
    int, typer.Option("--max-context", min=1, help="Tokens at which a session ends.", rich_help_panel=AGENTS)
]
