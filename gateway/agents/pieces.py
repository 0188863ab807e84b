"""Pieces that the dialects share: fields of a body, calls of an answer, server-sent events, errors."""

from collections.abc import Iterator
from typing import Any

from engines.engine import Json
from engines.errors import InvalidRequest, RolloutGatewayError, shown
from engines.raw_json import event
from gateway.agents.turn import present
from gateway.api import body_of, error_of, shortened, status_of


def refusal(where: str, value: Any, remedy: str) -> InvalidRequest:
    """Build the error of one field, such as `messages[3].content[0]`."""
    return InvalidRequest(f"{where} = {shown(value)}: {remedy}", param=where)


def objects(items: Any, where: str) -> Iterator[tuple[str, Json]]:
    """Yield each object of a list with its place. Raise `InvalidRequest` for other values."""
    if not isinstance(items, list):
        raise refusal(where, items, "this must be a list of objects")
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise refusal(f"{where}[{index}]", item, "this must be an object")
        yield f"{where}[{index}]", item


def function(name: Any, description: Any, parameters: Any, where: str, **more: Any) -> Json:
    """Return a tool in the form of a chat request; `more` are fields of its function, left out where None.

    Parameters that name no type are those of an object.
    """
    if not isinstance(name, str) or not name:
        raise refusal(f"{where}.name", name, "a tool needs a name")
    if parameters is not None and not isinstance(parameters, dict):
        raise refusal(f"{where}'s parameters", parameters, "give a JSON schema")
    schema = {"type": "object", **(parameters or {"properties": {}})}
    about = present(name=name, description=description, parameters=schema, **more)
    return {"type": "function", "function": about}


def named(name: Any, tools: list[Json], where: str) -> Json:
    """Return the choice of one tool in the form of a chat request."""
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise refusal(where, name, f"no tool has this name: there are {', '.join(names) or 'none'}")
    return {"type": "function", "function": {"name": name}}


class ChatMessages:
    """The messages of a chat request, as they are gathered. Images of tools' results go to the user message after
    these, since few templates have images in a result."""

    def __init__(self) -> None:
        self._messages: list[Json] = []
        self._images: list[Json] = []

    def add(self, message: Json) -> None:
        self._show_images()
        self._messages.append(message)

    def add_user(self, parts: list[Json]) -> None:
        parts, self._images = self._images + parts, []
        # One text is a string, as most templates have it.
        is_text = len(parts) == 1 and parts[0]["type"] == "text"
        if parts:
            self._messages.append({"role": "user", "content": parts[0]["text"] if is_text else parts})

    def add_result(self, call_id: str, content: str | list[Json], images: list[Json]) -> None:
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        self._images += images

    def all(self) -> list[Json]:
        self._show_images()
        return self._messages

    def _show_images(self) -> None:
        if self._images:
            self.add_user([])


def image(url: str) -> Json:
    """Return the part of a chat message that is an image."""
    return {"type": "image_url", "image_url": {"url": url}}


def named_event(body: Json) -> bytes:
    """Return a server-sent event that is named by its type."""
    return f"event: {body['type']}\n".encode() + event(body)


def failure(error: RolloutGatewayError) -> tuple[int, str]:
    """Return the status of an error and what a client is told: the engine's own message where it refused."""
    status = status_of(error)
    return status, shortened(str(error_of(status, body_of(error))))
