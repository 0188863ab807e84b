"""Makes few chunks of many, so that a long reply costs the gateway little.

Deltas of conversations are not joined: their tokens are, of which an engine makes the message.
"""

from collections.abc import Iterable
from itertools import accumulate, chain

from msgspec import Raw

from engines.chunks import Choice, Chunk
from engines.raw_json import NULL, decoded, encoded, inside_list

_OFFSETS = "text_offset"


class Joining:
    """What has come of a reply since it was last told."""

    def __init__(self) -> None:
        self._choices: dict[int, list[Choice]] = {}
        self._last: Chunk | None = None

    def take(self, chunk: Chunk) -> bool:
        """Take a chunk. Return True if a sample ends with it."""
        for choice in chunk.choices:
            self._choices.setdefault(choice.index, []).append(choice)
        if (before := self._last) is not None:
            chunk.usage, chunk.written = chunk.usage or before.usage, before.written
            chunk.prompt_token_ids = chunk.prompt_token_ids or before.prompt_token_ids
        self._last = chunk
        return any(choice.finish_reason is not None for choice in chunk.choices)

    def told(self) -> list[Chunk]:
        """Return all of it as one chunk, or none."""
        if (last := self._last) is None:
            return []
        choices = list(map(_joined, self._choices.values()))
        self._choices, self._last = {}, None
        return [Chunk(choices, last.usage, last.prompt_token_ids, last.written)]


def _joined(choices: list[Choice]) -> Choice:
    """The choices of one sample as one."""
    last = choices[-1]
    if len(choices) == 1:
        return last
    whole = Choice(last.index, last.finish_reason)
    texts = [choice.text for choice in choices if choice.text is not None]
    whole.text = "".join(texts) if texts else None
    whole.token_ids = _list_of(choice.token_ids for choice in choices)
    if scores := [choice.logprobs for choice in choices if choice.logprobs]:
        whole.logprobs = scores[0] if len(scores) == 1 else _joined_scores(scores)
    for choice in choices:
        if choice.prompt_token_ids != NULL:
            whole.prompt_token_ids = choice.prompt_token_ids
        whole.weight_versions = choice.weight_versions or whole.weight_versions
    lists = {"token_ids": whole.token_ids, "prompt_token_ids": whole.prompt_token_ids, "logprobs": whole.logprobs}
    told = last.told
    whole.written = told | {key: value for key, value in lists.items() if key in told}
    return whole


def _joined_scores(scores: list[dict[str, Raw]]) -> dict[str, Raw]:
    joined = {key: _list_of(score.get(key, NULL) for score in scores) for key in dict.fromkeys(chain(*scores))}
    if _OFFSETS in joined:  # each chunk counts from its own start, or from the text before, by the kind of engine
        names = decoded(joined["tokens"])
        joined[_OFFSETS] = Raw(encoded(list(accumulate(map(len, names[:-1]), initial=0))[: len(names)]))
    return joined


def _list_of(lists: Iterable[Raw]) -> Raw:
    """The items of all lists as one list; null where all are."""
    told = [inside_list(value) for value in lists if value != NULL]
    return Raw(b"[" + b",".join(filter(None, told)) + b"]") if told else NULL
