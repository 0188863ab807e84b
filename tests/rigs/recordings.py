"""Requests that agents sent, as they were recorded under tests/gateway/agents/recordings."""

import json
from pathlib import Path
from typing import Any

from gateway.agents.chat import ChatCompletions
from gateway.agents.messages import Messages
from gateway.agents.responses import Responses
from gateway.agents.turn import Dialect, Turn

_FOLDER = Path(__file__).parents[1] / "gateway/agents/recordings"
_DIALECTS: dict[str, Dialect] = {
    "/v1/messages?beta=true": Messages(),
    "/v1/responses": Responses(),
    "/v1/chat/completions": ChatCompletions(),
}
AGENTS = sorted(path.stem for path in _FOLDER.glob("*.json"))


def recorded(agent: str) -> list[Any]:
    """The `path`, `headers` and `body` of each request of a run, in order."""
    return json.loads((_FOLDER / f"{agent}.json").read_text())


def turns_of(agent: str) -> list[Turn]:
    return [_DIALECTS[call["path"]].read(call["body"]) for call in recorded(agent)]
