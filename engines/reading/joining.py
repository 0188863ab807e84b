"""Makes few chunks of many, so that a long reply costs the gateway little.

Deltas of conversations are not joined: their tokens are, of which an engine makes the message.
"""

from itertools import chain

from engines.chunks import OFFSETS, Choice, Chunk, offsets_of
from engines.raw_json import NULL, joined_lists

_NULL = bytes(NULL)


class Joining:
    """What has come of a reply since it was last told."""

    def __init__(self) -> None:
        self._choices: dict[int, list[Choice]] = {}
        self._last: Chunk | None = None
        self._ends: dict[int, int] = {}  # of the names of tokens that were told, one after the other

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
        choices = list(map(joined, self._choices.values()))
        for choice in choices:  # engines count from the start of a chunk, or from the text before it
            if (scores := choice.logprobs) is not None and OFFSETS in scores:
                begin = self._ends.get(choice.index, 0)
                scores[OFFSETS], self._ends[choice.index] = offsets_of(scores["tokens"], begin)
        self._choices, self._last = {}, None
        return [Chunk(choices, last.usage, last.prompt_token_ids, last.written)]


def joined(choices: list[Choice]) -> Choice:
    """The choices of one sample as one."""
    last = choices[-1]
    if len(choices) == 1:
        return last
    texts = [choice.text for choice in choices if choice.text is not None]
    whole = Choice(last.index, last.finish_reason, "".join(texts) if texts else None, written=last.written)
    if ids := [choice.token_ids for choice in choices if choice.token_ids is not None]:
        whole.token_ids = joined_lists(ids)
    whole.logprobs = _joined_scores([choice.logprobs for choice in choices if choice.logprobs])
    for choice in choices:
        whole.num_tokens += choice.num_tokens
        whole.num_unscored += choice.num_unscored
        whole.prompt_token_ids = choice.prompt_token_ids or whole.prompt_token_ids
        whole.weight_versions = choice.weight_versions or whole.weight_versions
    return whole


def _joined_scores(scores: list[dict[str, bytes]]) -> dict[str, bytes] | None:
    if len(scores) < 2:
        return scores[0] if scores else None
    joined = {}
    for key in dict.fromkeys(chain(*scores)):
        lists = [score[key] for score in scores if key in score]
        if _NULL in lists:
            lists = [one for one in lists if one != _NULL]
        joined[key] = joined_lists(lists) if lists else _NULL
    return joined
