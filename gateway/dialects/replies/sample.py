"""One sample of a reply that is read in chunks: values as the engine wrote them, one behind the other."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Annotated

from msgspec import Meta, Raw, Struct

from engines.engine import Json
from gateway.dialects.replies.carried import (
    NULL,
    check_text,
    choice_of,
    insides_of_lists,
    insides_of_texts,
    list_of,
    text_of,
)
from gateway.dialects.replies.offsets import Offsets

_OFFSETS, _NAMES = "text_offset", "tokens"


class Choice(Struct, gc=False):
    """A choice of a chunk, its lists as the engine wrote them."""

    index: Annotated[int, Meta(ge=0)]
    finish_reason: str | None = None
    text: Raw = NULL
    token_ids: Raw = NULL
    prompt_token_ids: Raw = NULL
    logprobs: dict[str, Raw] | None = None


class Sample:
    """The chunks of one sample, without what is around them. vLLM sends none, or an opening alone, for a sample that
    was aborted before its first token."""

    def __init__(self, index: int, *, has_text: bool) -> None:
        self.index = index
        self.num_tokens = 0
        self._has_text = has_text
        # What came, without delimiters: few large buffers, since many small objects leave holes in memory.
        self._text, self._ids = bytearray(), bytearray()
        self._logprobs: defaultdict[str, bytearray] = defaultdict(bytearray)
        self._offsets = Offsets()
        self._prompt: Raw | None = None
        self._finish_reason: str | None = None
        self._last = b""
        self._has_begun = True

    @property
    def has_ended(self) -> bool:
        return not self.num_tokens or self._finish_reason is not None

    def add(self, came: Sequence[tuple[Choice, bytes]]) -> None:
        """Take choices with their chunks. Raise `ValueError` at a value of another kind; those before it are kept."""
        if not came:
            return
        try:
            self._add([choice for choice, _ in came])
            self._last = came[-1][1]
        except ValueError:
            if len(came) == 1:
                raise
            for one in came:
                self.add([one])

    def _add(self, choices: Sequence[Choice]) -> None:
        """Take all of these choices, or none."""
        token_ids = insides_of_lists([choice.token_ids for choice in choices])
        text = insides_of_texts([choice.text for choice in choices])
        prompt = self._prompt or _prompt_among(choices)
        scores: defaultdict[str, list[Raw]] = defaultdict(list)
        for choice in choices:
            for key, value in (choice.logprobs or {}).items():
                scores[key].append(value)
        offsets = scores.pop(_OFFSETS, ())
        insides = {key: insides_of_lists(values) for key, values in scores.items()}
        if token_ids:
            self._ids += b","
            self._ids += token_ids
            self.num_tokens += token_ids.count(b",") + 1
        self._text += text
        self._prompt = prompt
        for key, inside in insides.items():
            so_far = self._logprobs[key]
            if inside:
                so_far += b","
                so_far += inside
        if offsets:
            self._logprobs.setdefault(_OFFSETS, bytearray())  # its place among the keys
            for one, names in zip_longest(offsets, scores.get(_NAMES, ()), fillvalue=NULL):
                self._offsets.add(one, names)
        self._finish_reason = choices[-1].finish_reason

    def opened(self) -> None:
        """A sample without any chunk has not ended when the stream breaks."""
        self._has_begun = self.num_tokens > 0

    @cached_property
    def choice(self) -> Json:
        """The sample joined; its buffers become the values."""
        last = choice_of(self._last, self.index) if self._last else {}
        if not self._has_begun:
            last = {"finish_reason": None}
        elif last.get("finish_reason") is None and not self.num_tokens:
            last["finish_reason"] = "abort"
        check_text(self._text)
        logprobs = self._joined_logprobs()  # nothing after it fails: a buffer can become a value once
        text = {"text": text_of(self._text), "prompt_logprobs": None} if self._has_text else {}
        return {
            "stop_reason": None,
            **last,
            **text,
            "index": self.index,
            "logprobs": logprobs,
            "token_ids": list_of(self._ids) if self._ids else [],
            "prompt_token_ids": self._prompt,
        }

    def _joined_logprobs(self) -> dict[str, Raw] | None:
        if _OFFSETS not in self._logprobs:
            return {key: list_of(so_far) for key, so_far in self._logprobs.items()} or None
        if _NAMES not in self._logprobs:
            raise ValueError("log-probs have offsets of tokens, and no tokens")
        offsets = self._offsets.joined(self._logprobs[_NAMES])
        return {key: list_of(so_far) for key, so_far in self._logprobs.items()} | {_OFFSETS: offsets}


def _prompt_among(choices: Sequence[Choice]) -> Raw | None:
    prompts = (choice.prompt_token_ids for choice in choices)
    return next((prompt for prompt in prompts if prompt is not NULL and insides_of_lists([prompt])), None)
