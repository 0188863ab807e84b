"""Continues completions that were cut off: from their tokens, or from the prompt.

`resumption/features.py` has the fields of a request that decide which; `resumption/chat.py` has the further conditions
of a conversation. Routed experts and sampling masks are reported for all tokens at once, so a reply with them restarts.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from engines.engine import Json
from engines.errors import EngineFailed
from gateway.dialects.replies.carried import num_tokens
from gateway.dialects.resumption.features import is_greedy, later_seed
from gateway.fleet.replica import Replica

CUT_OFF = "cut off"
"""The finish_reason of a choice that continues. No client sees it."""

_LONGEST_CHARACTER = 4  # bytes, each of which may be a token
_HALF = "\N{REPLACEMENT CHARACTER}"
_LIMITS = ("start", "end")
_TOLD_OF_ALL = ("routed_experts", "sampling_mask")  # encoded over all tokens of a choice
_OF_THE_WHOLE = ("max_completion_tokens", "min_tokens", "request_id")


def was_cut_off(answer: Json, replica: Replica) -> bool:
    """True if an update ended choices of a reply, or of a chunk, that has just arrived."""
    return replica.cuts_off and any(choice.get("finish_reason") == "abort" for choice in answer["choices"])


def refuse_cut_off(answer: Json, replica: Replica) -> None:
    """Raise `EngineFailed` if an update ended part of a reply that has to restart as a whole."""
    if was_cut_off(answer, replica):
        raise cut_off_at(replica)


def refuse_half_called(answer: Json, replica: Replica) -> None:
    """Raise `EngineFailed` if a conversation that an update ended may report tool calls as its end.

    vLLM reports so after the first tool call, also where more calls were to follow.
    """
    if replica.cuts_off and any(choice.get("finish_reason") == "tool_calls" for choice in answer["choices"]):
        raise cut_off_at(replica)


def mark_cut_off(answer: Json, replica: Replica, read: Any, *, resumes: bool) -> None:
    """Mark the choices that continue. Raises `EngineFailed` if the reply has to restart as a whole.

    `read` are the prompt's token ids, if they are known; `resumes` is True if the request may continue from tokens.
    """
    if not was_cut_off(answer, replica):
        return
    choices = answer["choices"]
    is_plain = not any(choice.get(field) for choice in choices for field in _TOLD_OF_ALL)
    if read is None or not any(num_tokens(choice.get("token_ids")) for choice in choices) or not (resumes and is_plain):
        refuse_cut_off(answer, replica)
    for choice in choices:
        if choice["finish_reason"] == "abort":
            choice |= {"finish_reason": CUT_OFF, "prompt_token_ids": read}


def places_cut_off(answer: Json) -> list[int]:
    """Places of the choices that continue."""
    return [place for place, choice in enumerate(answer["choices"]) if choice["finish_reason"] == CUT_OFF]


async def retried_if_empty(blocks: AsyncGenerator[list[Json]], replica: Replica) -> AsyncGenerator[list[Json]]:
    """The chunks of a stream, in lists. Raises `EngineFailed`, so that it restarts, if an update ends it before its
    first token.

    A stream with tokens cannot be taken back.
    """
    opening: list[Json] = []
    async with aclosing(blocks):
        async for chunks in blocks:
            opening += chunks
            if any(_opens(chunk, replica) for chunk in chunks):
                yield opening
                break
        else:  # vLLM sends no chunk for a sample that it had not begun
            if replica.cuts_off:
                raise cut_off_at(replica)
            yield opening
        async for chunks in blocks:
            yield chunks


def _opens(chunk: Json, replica: Replica) -> bool:
    """True if a chunk has tokens, or an end that is not an update's. Raises `EngineFailed` for an update's."""
    if any(_has_content(choice) for choice in chunk["choices"]):
        return True
    refuse_cut_off(chunk, replica)
    return any(choice.get("finish_reason") for choice in chunk["choices"])


def rest_body(body: Json, read: list[int], kept: int, index: int = 0) -> Json:
    """The body that continues sample `index` of its group. The last `kept` tokens of the prompt `read` were generated.

    `index` is 0 where the body is of one sample.
    """
    return rest_sampling(body, read[len(read) - kept :], index) | {"prompt": read}


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


def joined(first: Json, rest: Json) -> Json:
    """Two choices joined: the second continues the prompt and the tokens of the first, or most of them.

    An engine reports no prompt for a rest that was aborted before its first token: all of the first is kept then.
    """
    kept = len(rest["prompt_token_ids"] or first["prompt_token_ids"] + first["token_ids"])
    kept -= len(first["prompt_token_ids"])
    text = first["text"].removesuffix(_HALF) if kept < len(first["token_ids"]) else first["text"]
    return {
        "kv_versions": first.get("kv_versions"),
        **rest,
        "index": first["index"],
        "text": text + rest["text"],
        "token_ids": first["token_ids"][:kept] + rest["token_ids"],
        "prompt_token_ids": first["prompt_token_ids"],
        "logprobs": _joined_logprobs(first.get("logprobs"), rest.get("logprobs"), kept),
        "weight_versions": joined_spans(first["weight_versions"], rest["weight_versions"], kept),
    }


def joined_tokens(first: Json, rest: Json) -> Json:
    """Two choices of token ids joined: the second continues all tokens of the first."""
    made, parts = first["token_ids"] or [], [part["logprobs"] for part in (first, rest) if part.get("logprobs")]
    return {
        "kv_versions": first.get("kv_versions"),
        **rest,
        "index": first["index"],
        "token_ids": made + rest["token_ids"],
        "logprobs": {"content": [entry for part in parts for entry in part["content"]]} if parts else None,
        "weight_versions": joined_spans(first["weight_versions"], rest["weight_versions"], len(made)),
    }


def joined_spans(first: list[Json], rest: list[Json], kept: int) -> list[Json]:
    """Spans over both parts: the first as far as `kept`, then the rest. A version without limits is named once."""
    spans: list[Json] = []
    cut = ({**span, "end": None if span["end"] is None else min(span["end"], kept)} for span in first if kept)
    moved = ({**span, **{key: _plus(span[key], kept) for key in _LIMITS}} for span in rest)
    for span in (*cut, *moved):
        if span["end"] is not None and span["start"] >= span["end"]:
            continue
        if spans and _follows(span, spans[-1]):
            spans[-1]["end"] = span["end"]
        elif span not in spans:
            spans.append(span)
    return spans


def _joined_logprobs(first: Json | None, rest: Json | None, kept: int) -> Json | None:
    if first is None or rest is None:
        return rest if first is None else first  # not requested, or one part has no tokens
    both = {key: first[key][:kept] + rest[key] for key in ("token_logprobs", "tokens", "top_logprobs")}
    moved = shifted(rest, sum(map(len, both["tokens"][:kept])))
    return {"text_offset": first["text_offset"][:kept] + moved["text_offset"], **both}


def shifted(logprobs: Json, characters: int) -> Json:
    """Log-probs of a rest after so many characters of text. Those of token ids have no place in the text."""
    if "text_offset" not in logprobs:
        return logprobs
    return logprobs | {"text_offset": [characters + offset for offset in logprobs["text_offset"]]}


def cut_off_at(replica: Replica) -> EngineFailed:
    """The error of a request that an update cut off and that cannot continue."""
    return EngineFailed("the reply was cut off and cannot continue", replica_id=replica.replica_id)


def _has_content(choice: Json) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("token_ids") or choice.get("text") or any(delta[key] for key in delta if key != "role"))


def _follows(span: Json, before: Json) -> bool:
    """True if the same weights made both spans, one right after the other."""
    is_next = span["start"] is not None and span["start"] == before["end"]
    return is_next and before == {**span, **{key: before[key] for key in _LIMITS}}


def _plus(limit: int | None, tokens: int) -> int | None:
    return None if limit is None else limit + tokens
