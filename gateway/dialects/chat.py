"""/v1/chat/completions of vLLM's dialect: one conversation is one rollout.

A conversation that was cut off continues as token ids, and is then parsed by an engine as if it were made at once: an
engine renders the messages (`Rendering`), `TokenGeneration` makes the rest from the prompt's ids and the ids made so
far, and an engine parses text, reasoning and tool calls from all of them.

The rules of `resumption.py` hold for the body and for the rendered sampling parameters. A forced tool call is
structured output there, and restarts. So does a conversation with images, with a field that is not known here, or whose
prompt is rendered differently now than before.

A conversation that is read in chunks has token ids alone; an engine gives it its message (`worded`).
"""

import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import structlog

from engines.chunks import num_unscored
from engines.engine import Json
from engines.errors import DeadlineExceeded, EngineError, InvalidRequest, UnknownRoute
from engines.raw_json import opened
from engines.types import Dialect
from gateway.dialects.rendering import Rendering
from gateway.dialects.resumption import MARK, inexact_fields
from gateway.dialects.runner import DEFAULT_MAX_TOKENS, Ask, Runner, using
from gateway.dialects.sample import UNSCORED, Reply, Sample
from gateway.dialects.sampling import Terms, check_sampling
from gateway.dialects.token_generation import TokenGeneration
from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica

log = structlog.get_logger()

T = TypeVar("T")

PATH = "/v1/chat/completions"
_TEXT_PARTS = ("text", "input_text", "refusal")
_CHARACTERS_PER_TOKEN = 4
# Load of an image or a sound, whose tokens do not depend on its bytes.
_CHARACTERS_PER_MEDIUM = 4096
_OF_TOKENS = ("stop_reason", "token_ids", "weight_versions", "kv_versions", MARK)
_OF_STREAMS = ("prompt_token_ids", "delta")  # a reply has the prompt once, beside its choices
# Fields that end in the rendered prompt or in the message.
_OF_CONVERSATIONS = frozenset(
    {
        "messages", "tools", "tool_choice", "top_logprobs", "reasoning_effort", "include_reasoning",
        "add_generation_prompt", "continue_final_message", "documents", "chat_template", "chat_template_kwargs",
    }
)  # fmt: skip
# Fields that ask for nothing with this value.
_NEUTRAL: Json = {
    "parallel_tool_calls": True, "return_tokens_as_token_ids": False, "return_prompt_text": False,
}  # fmt: skip
_FREE_TOOLS = (None, "auto", "none")


@dataclass(kw_only=True)
class Conversation(Ask):
    """One conversation as its body asks for it.

    `reads_whole_reply` is True where no engine parses the tokens of a reply that was read in chunks.
    """

    rendering: Rendering
    reads_whole_reply: bool = False

    # vLLM's parsers hold text back, and release it at the end of a stream, also where that is a cut.
    streams_continue: ClassVar[bool] = False

    @cached_property
    def inexact(self) -> tuple[str, ...] | None:
        """As far as its fields and the engines' routes go."""
        body = self.body
        if body.get("tool_choice") not in _FREE_TOOLS or _has_media(body["messages"]):
            return None
        if not self.rendering.renders(body):
            return None
        asked = {key: value for key, value in body.items() if key not in _OF_CONVERSATIONS}
        return inexact_fields({k: v for k, v in asked.items() if k not in _NEUTRAL or v != _NEUTRAL[k]})

    @property
    def _streams_ids(self) -> bool:
        """False where vLLM leaves out reasoning, and the token ids of a stream with it."""
        return self.body.get("include_reasoning") is not False

    def reads_whole(self, replica: Replica) -> bool:
        return (
            self.reads_whole_reply
            or replica.info.dialect is not Dialect.VLLM  # SGLang tells no token ids in the stream of a conversation
            or super().reads_whole(replica)
            or not (self.resumes and self._streams_ids)
        )

    async def asked(self, replica: Replica, *, streams: bool) -> tuple[str, Json]:
        ids = {} if streams and not self._streams_ids else {"return_token_ids": True}
        return PATH, {**self.body, **ids}

    def told(self, reply: Reply) -> Json:
        return super().told(reply) | {"prompt_token_ids": reply.prompt}

    def bare(self) -> Json:
        return {"delta": {"content": ""}, "logprobs": None, "token_ids": []}

    def bare_head(self) -> Json:
        head = {"id": f"chatcmpl-{self.rollout.request_id}", "object": "chat.completion.chunk"}
        return head | {"created": int(time.time()), "model": self.body.get("model") or self.rollout.model}

    def as_asked(self, told: Json) -> Json:
        """Without the token ids that the client did not ask for."""
        if not self.body.get("return_token_ids"):
            for one in (told, *told["choices"]):
                one |= {key: None for key in ("token_ids", "prompt_token_ids") if key in one}
        return told

    def shows(self, choice: Json) -> bool:
        """True if a choice has something for the client: vLLM sends ids also of text that its parsers hold back."""
        fields = ("delta", "finish_reason", "logprobs") + (("token_ids",) if self.body.get("return_token_ids") else ())
        return any(choice.get(field) for field in fields)


class Chat:
    """Decodes a conversation and has replicas continue it."""

    def __init__(self, fleet: Fleet, runner: Runner, tokens: TokenGeneration, rendering: Rendering) -> None:
        self._fleet = fleet
        self._runner = runner
        self._tokens = tokens
        self._rendering = rendering

    def decode(self, body: Json, request_id: str, session: str = "") -> Conversation:
        """Raises `InvalidRequest` for fields that no engine would take."""
        n, messages = check_sampling(body), body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest("messages must be a list of at least one message", param="messages")
        limit: int | None = body.get("max_completion_tokens") or body.get("max_tokens")
        rollout = Terms.take(body, self._fleet, self._runner.lengths).rollout(
            request_id,
            _text_of(messages, session),
            n=n,
            prompt_tokens=sum(map(_characters, messages)) // _CHARACTERS_PER_TOKEN,
            limit=limit or DEFAULT_MAX_TOKENS,
            session=session,
        )
        return Conversation(rollout=rollout, body=body, limit=limit, rendering=self._rendering)

    async def generate(self, conversation: Conversation) -> Json:
        rollout = conversation.rollout
        with using(rollout):
            answer = await self._worded(conversation, await self._generated(conversation))
            if answer is None:
                answer = await self._generated(replace(conversation, reads_whole_reply=True))
        self._runner.learn(rollout, answer["usage"], [choice["finish_reason"] for choice in answer["choices"]])
        self._runner.count_missing(sum(choice.get(UNSCORED, 0) for choice in answer["choices"]))
        whole = {"object": "chat.completion", "prompt_logprobs": answer.get("prompt_logprobs")}
        return conversation.as_asked({**answer, **whole})

    async def _generated(self, conversation: Conversation) -> Json:
        """The reply, continued where it was cut off. Choices that were read in chunks have no message yet."""
        while True:
            reply = Reply()
            await self._runner.make(conversation, reply)
            if not reply.open:
                return conversation.told(reply)
            if (answer := await self._continued(conversation, reply)) is not None:
                return answer
            conversation.rollout.attempts.lost_tokens()

    async def _continued(self, conversation: Conversation, reply: Reply) -> Json | None:
        """The reply with the rests of its open samples. None where the conversation has to restart."""
        body = conversation.body
        answer: Json = opened(conversation.told(reply))
        cut = [answer["choices"][sample.index] for sample in reply.open]
        if body.get("logprobs") and not all(map(_has_all_logprobs, cut)):
            return None
        asked = await self._rendered(conversation, reply.prompt or [])
        if asked is None:
            return None
        prompt = self._tokens.prompt(conversation.rollout, asked)
        ids = Reply(asked["token_ids"], [Sample.of(choice | {"logprobs": _by_id(choice)}) for choice in cut])
        try:
            await self._runner.go_on(prompt, ids)
        except (UnknownRoute, DeadlineExceeded):  # engines of another kind may make it from its messages
            return None
        whole = opened(prompt.told(ids)["choices"])
        parsed = await self._parsed(conversation, asked["token_ids"], cut, whole)
        if parsed is None:
            return None
        choices = [parsed.get(choice["index"], choice) for choice in answer["choices"]]
        for choice in choices:
            if unscored := num_unscored(choice.get("logprobs") or {}, len(choice["token_ids"])):
                choice[UNSCORED] = unscored
        made, usage = sum(len(choice["token_ids"]) for choice in choices), answer["usage"]
        usage |= {"completion_tokens": made, "total_tokens": usage["prompt_tokens"] + made}  # none is counted twice
        if usage.get("completion_tokens_details"):
            usage["completion_tokens_details"] = None  # of the first part alone
        return {**answer, "choices": choices}

    async def _worded(self, conversation: Conversation, answer: Json) -> Json | None:
        """The reply with the messages that it lacks, parsed from its tokens. None where no replica parses them."""
        if all("message" in choice for choice in answer["choices"]):
            return answer
        answer = opened(answer)
        bare = [_bare(choice, conversation.body) for choice in answer["choices"] if "message" not in choice]
        parsed = await self._parsed(conversation, answer["prompt_token_ids"], bare, bare)
        if parsed is None:
            return None
        choices = [
            parsed[choice["index"]] | {"logprobs": choice["logprobs"]} if "message" not in choice else choice
            for choice in answer["choices"]
        ]
        return {**answer, "choices": choices}

    async def _rendered(self, conversation: Conversation, read: list[int]) -> Json | None:
        """The conversation as token ids if it may continue, else None; `read` are the ids that the engine read."""
        body = conversation.body
        rendered = await self._helped(conversation, self._rendering.render(body))
        if rendered is None or rendered.get("features") or rendered["token_ids"] != read:
            return None
        sampling = rendered["sampling_params"]
        passed = {key: body[key] for key in ("model", "cache_salt", "priority") if body.get(key) is not None}
        is_plain = inexact_fields(sampling) is not None
        return passed | {"token_ids": read, "sampling_params": sampling} if is_plain else None

    async def _parsed(
        self, conversation: Conversation, prompt: list[int], cut: Sequence[Json], whole: Sequence[Json]
    ) -> dict[int, Json] | None:
        """These choices as a conversation's, parsed from all of their tokens, by index."""
        body = conversation.body
        parsed = await self._helped(conversation, self._rendering.messages(body, prompt, whole))
        if parsed is None:
            return None
        told = zip(cut, whole, parsed, strict=True)
        return {first["index"]: _as_chat(first, choice, worded, body) for first, choice, worded in told}

    async def _helped(self, conversation: Conversation, asking: Awaitable[T]) -> T | None:
        """What an engine answers; None where none does."""
        try:
            return await asking
        except (EngineError, DeadlineExceeded) as error:
            request = conversation.rollout.request_id
            log.warning("no replica helps to continue a conversation", request=request, error=str(error))
            return None


def _characters(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return len(str(message))
    return sum(_CHARACTERS_PER_MEDIUM if _is_medium(part) else len(str(part)) for part in content)


def _text_of(messages: list[Any], session: str) -> str:
    """The text by which lengths are known; "" for a turn, which does not come again, and for parts such as images."""
    is_plain = all(isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages)
    return str(messages) if is_plain and not session else ""


def _has_all_logprobs(choice: Json) -> bool:
    """False where the engine has left out log-probs of tokens: those that it gave cannot be told apart by token."""
    entries = (choice.get("logprobs") or {}).get("content") or ()
    return len(entries) == len(choice["token_ids"])


def _by_id(choice: Json) -> Json | None:
    """The log-probs of a conversation's choice in the form of token ids. Its candidates have names alone."""
    if not choice.get("logprobs"):
        return None
    entries = zip(choice["token_ids"], choice["logprobs"]["content"], strict=True)
    return {"content": [{"token_id": token_id, "logprob": entry["logprob"]} for token_id, entry in entries]}


def _bare(choice: Json, body: Json) -> Json:
    """A choice that was read as a stream, as its token ids alone have it.

    vLLM reports a stream's end as `tool_calls` after any call; without the limit reached, a stop token ended it.
    """
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    ended = "length" if len(choice["token_ids"]) == limit else "stop"
    reason = ended if choice["finish_reason"] == "tool_calls" else choice["finish_reason"]
    return choice | {"logprobs": None, "finish_reason": reason}


def _has_media(messages: list[Any]) -> bool:
    """True for messages with images, sound or video, which token ids alone do not continue."""
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(map(_is_medium, parts))


def _as_chat(first: Json, whole: Json, parsed: Json, body: Json) -> Json:
    """One choice of a conversation: all its tokens, as `parsed` by an engine; `first` is its part before a cut."""
    message = parsed["message"]
    calls = message.get("tool_calls") and body.get("tool_choice") in (None, "auto")
    return {key: value for key, value in first.items() if key not in _OF_STREAMS} | {
        "message": message,
        "logprobs": whole["logprobs"] and _as_chats_logprobs(first, parsed, body.get("top_logprobs") or 0),
        "finish_reason": "tool_calls" if calls else whole["finish_reason"],
        **{key: whole[key] for key in _OF_TOKENS if key in whole},
    }


def _as_chats_logprobs(first: Json, parsed: Json, top: int) -> Json:
    before = first["logprobs"]["content"] if first["logprobs"] else []
    after = parsed["logprobs"]["content"][len(before) :]
    if top >= 0:
        after = [entry | {"top_logprobs": entry["top_logprobs"][:top]} for entry in after]
    return {"content": before + after}


def _is_medium(part: Any) -> bool:
    """True for a part of a message that is an image, a sound or a video."""
    return isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS
