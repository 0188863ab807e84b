"""Engines that render conversations with a chat template of a real model, which vLLM hands them in this form."""

import json
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engines.errors import EngineRefused
from gateway.dialects.rendering import Rendering

Json = dict[str, Any]
ROOM = 40_960
_SPECIAL = re.compile(
    r"<\|[^|>\s'\"{]+\|?>|<[a-z_]+\|>|<\|\"\|>|<｜[^<>'\"\s{]+｜>|</?tool_call>|</?think>|</?tool_response>|\[/?[A-Z_]{3,}\]"
)
_TRAINED_ON = [
    "The files of this folder are a.py and b.py. Read them, then tell me what they do and what is missing in them.",
    '{"name": "ls", "arguments": {"path": "src", "depth": 2}}',
]


def chat_template(name: str) -> str:
    """Return the template of a family of models, as TRL keeps it."""
    trl = find_spec("trl")
    assert trl is not None
    assert trl.submodule_search_locations
    return Path(trl.submodule_search_locations[0], "chat_templates", f"{name}.jinja").read_text(encoding="utf-8")


@cache
def tokenizer(template: str, begin: str | None = None) -> PreTrainedTokenizerFast:
    """Return a small tokenizer of bytes, whose special tokens are those of a template."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    special = sorted({"<|endoftext|>", *_SPECIAL.findall(template), *([begin] if begin else [])})
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    bare.train_from_iterator(_TRAINED_ON, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bare, bos_token=begin)


@dataclass(frozen=True)
class Templated(Rendering):
    """Stands in for the engines of a model; `asked` has the chat requests that they rendered."""

    template: str
    tokens: PreTrainedTokenizerFast
    asked: list[Json] = field(default_factory=list)

    @classmethod
    def of(cls, template: str, tokens: PreTrainedTokenizerFast) -> "Templated":
        nothing: Any = None
        return cls(fleet=nothing, any_replica=nothing, longest_wait_s=0.0, template=template, tokens=tokens)

    async def render(self, chat: Json) -> Json | None:
        self.asked.append(chat)
        token_ids = self.encoded(self.text(chat))
        room = ROOM - len(token_ids)
        if room < 0:
            raise EngineRefused(f"the prompt has {len(token_ids)} tokens", status=400, body={})
        sampling = {"temperature": chat.get("temperature", 1.0), "max_tokens": min(room, chat.get("max_tokens", room))}
        return {"token_ids": token_ids, "sampling_params": sampling, "features": None}

    def room(self, name: str | None) -> int | None:
        return ROOM

    def text(self, chat: Json, opens: bool = True) -> str:
        """Return a conversation as text; `opens` the next answer, or not."""
        fields = chat.get("chat_template_kwargs", {}) | {"add_generation_prompt": opens}
        messages = [_prepared(message) for message in chat["messages"]]
        try:
            text = self.tokens.apply_chat_template(
                messages, chat.get("tools"), chat_template=self.template, tokenize=False, **fields
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise EngineRefused(str(error), status=400, body={}) from error
        return str(text)

    def encoded(self, text: str) -> list[int]:
        return self.tokens.encode(text, add_special_tokens=False)

    def decoded(self, token_ids: list[int]) -> str:
        return str(self.tokens.decode(token_ids))


def _prepared(message: Json) -> Json:
    message = {**message, "content": _text(message.get("content"))}
    if "reasoning" in message:
        message["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        message["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return message


def _text(content: Any) -> str:
    return "\n".join(part.get("text", "<image>") for part in content) if isinstance(content, list) else content or ""


def _with_object(call: Json) -> Json:
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except ValueError:
        arguments = {}
    return call | {"function": call["function"] | {"arguments": arguments}}
