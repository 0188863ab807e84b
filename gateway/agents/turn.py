"""One call of an agent, in no client's words: what it asks for, and the answer.

A dialect translates its body to a `Turn`, and an `Answer` to its reply. Messages and tools are those of
/v1/chat/completions, since engines render and parse these.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from engines.engine import Json
from engines.errors import RolloutGatewayError
from gateway.api import body_of
from gateway.fleet.placement.sessions import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one call asks for.

    `template` has the other fields of a chat request that the chat template reads, such as `chat_template_kwargs` and
    `reasoning_effort`. `sampling` has the sampling parameters under vLLM's names, without the limit; `max_tokens` is
    None where the client names none. `echo` has what the dialect's reply repeats of the body; nobody else reads it.
    """

    model: str | None
    messages: list[Json]
    tools: list[Json] = field(default_factory=list)
    tool_choice: str | Json | None = None
    template: Json = field(default_factory=dict)
    sampling: Json = field(default_factory=dict)
    max_tokens: int | None = None
    streams: bool = False
    echo: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose call it is: `client` as its key has it, `placement` its session's name there. `identity` is that of the
    session that records it; None for a call that is not recorded. `is_retry` if its client says that it asks again."""

    request_id: str
    client: str
    placement: str
    dialect: str
    identity: Identity | None
    is_retry: bool = False


def present(**fields: Any) -> Json:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def chat_request(turn: Turn) -> Json:
    """Return a turn as the body of /v1/chat/completions."""
    asked = present(
        model=turn.model, tools=turn.tools or None, tool_choice=turn.tool_choice, max_tokens=turn.max_tokens
    )
    return {"messages": turn.messages, **asked, **turn.template, **turn.sampling}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a turn.

    `message` is an assistant's message of a chat reply: `content`, `reasoning` and `tool_calls`. `finish_reason` is
    "stop", "length", "tool_calls" or "abort"; `stop_reason` is the stop string that ended it. `undelivered`
    notes that the client has left before it had all of the answer.
    """

    id: str
    model: str
    message: Json
    finish_reason: str
    stop_reason: str | int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    undelivered: Callable[[], None] = lambda: None

    @property
    def calls(self) -> list[Json]:
        """Its calls, with their arguments as they were sampled. A call that its parser left without an id gets one that
        no other call has."""
        return [
            {
                "id": call.get("id") or f"call_{self.id}_{index}",
                "type": "function",
                "function": {name: call["function"].get(name) or "" for name in ("name", "arguments")},
            }
            for index, call in enumerate(self.message.get("tool_calls") or ())
        ]

    @property
    def is_cut(self) -> bool:
        """True if it ended before the model's own end or a stop string."""
        return self.finish_reason in ("length", "abort")


class Dialect(Protocol):
    """The words of one kind of client. A streamed reply is made up once the answer is whole; `ping` keeps a client
    waiting for it."""

    ping: bytes = b": ping\n\n"

    def read(self, body: Json) -> Turn:
        """Return what a body asks for. Raise `InvalidRequest` with the field, its value and a remedy."""
        ...

    def begin(self, answer_id: str, turn: Turn) -> bytes:
        """Return the events that open a stream, before the answer is there."""
        ...

    def reply(self, answer: Answer, turn: Turn) -> Json:
        """Return a whole reply."""
        ...

    def events(self, answer: Answer, turn: Turn) -> Iterator[bytes]:
        """Yield the events of a stream after `begin`, to its end."""
        ...

    def error(self, error: RolloutGatewayError) -> Json:
        """Return the body of an error."""
        return body_of(error)

    def error_event(self, error: RolloutGatewayError) -> bytes:
        """Return the event that ends a stream that has begun."""
        ...
