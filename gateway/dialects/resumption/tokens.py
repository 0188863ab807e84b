"""The tokens with which a sample that was cut off goes on: they are read as the end of its prompt.

`resumption/features.py` has the fields of a request that decide whether it may; `resumption/chat.py` has the further
conditions of a conversation.
"""

from collections.abc import Awaitable, Callable, Sequence

from engines.engine import Json
from gateway.dialects.resumption.features import is_greedy, later_seed

_LONGEST_CHARACTER = 4  # bytes, each of which may be a token
_HALF = "\N{REPLACEMENT CHARACTER}"
_OF_THE_WHOLE = ("max_completion_tokens", "min_tokens", "request_id")


def rest_sampling(sampling: Json, made: Sequence[int], index: int) -> Json:
    """The sampling parameters that continue sample `index` of a group after the generated tokens `made`."""
    limit, least = sampling.get("max_tokens"), max(0, (sampling.get("min_tokens") or 0) - len(made))
    rest = {key: value for key, value in sampling.items() if key not in _OF_THE_WHOLE}
    limits = ({} if limit is None else {"max_tokens": limit - len(made)}) | ({"min_tokens": least} if least else {})
    return rest | {"n": 1} | limits | _rest_seed(sampling, made, index)


def _rest_seed(sampling: Json, made: Sequence[int], index: int) -> Json:
    """The seed of one sample's rest, if it has one: vLLM draws sample `index` of a group with `seed + index`."""
    if sampling.get("seed") is None or is_greedy(sampling):
        return {}
    seed = sampling["seed"] + index
    return {"seed": later_seed(seed, made) if made else seed}


async def whole_characters(token_ids: list[int], detokenize: Callable[[list[int]], Awaitable[str]]) -> list[int]:
    """These tokens without an incomplete character at their end.

    Engines report a character with its last byte, and would never report a character that began in the prompt.
    """
    for dropped in range(min(_LONGEST_CHARACTER, len(token_ids))):
        kept = token_ids[: len(token_ids) - dropped]
        if not (await detokenize(kept[-_LONGEST_CHARACTER:])).endswith(_HALF):
            return kept
    return token_ids  # the model wrote an invalid character
