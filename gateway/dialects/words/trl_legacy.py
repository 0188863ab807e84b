"""Translates bodies of TRL's own server, which TRL up to 1.10 calls, into vLLM's, and the replies back. Pure.

TRL                                           vLLM
prompts (texts or token ids)                  prompt
messages (a list of conversations)            messages, a request each
logprobs k                                    logprobs k; logprobs and top_logprobs k for chats
structured_outputs_regex                      structured_outputs.regex
generation_kwargs                             fields of the same names, which win
sequences, top_logprobs k                     prompt and prompt_logprobs k, a request each
"""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from engines.engine import Json
from engines.errors import InvalidRequest, shown
from gateway.dialects.words.tokens import token_id_of

_SAMPLING: Json = {
    "n": 1, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 16,
    "logprobs": 0,
}  # fmt: skip
_TOKENS_BY_ID = {"return_token_ids": True, "return_tokens_as_token_ids": True}
_DEFAULT_TOP = 100

Ranked = tuple[list[list[float | None]], list[list[int]]]
"""Log-probs and token ids of one sequence: a list for each position, likeliest first."""


def completion_body(asked: Json) -> Json:
    """Return a body of /generate/ as a body of /v1/completions."""
    given = asked.get("images") or ()
    if not isinstance(given, list | tuple):
        raise InvalidRequest(f"images is {type(given).__name__}, no list with an entry for each prompt", param="images")
    if images := [index for index, found in enumerate(given) if found]:
        raise InvalidRequest(
            f"images[{images[0]}]: TRL's legacy dialect carries no images here; use TRL 1.11 or newer for them",
            param="images",
        )
    prompts = asked.get("prompts")
    if not isinstance(prompts, list) or not prompts:
        raise InvalidRequest("prompts must be a list of at least one text or list of token ids", param="prompts")
    return _sampling(asked) | _TOKENS_BY_ID | {"prompt": prompts}


def chat_bodies(asked: Json) -> list[Json]:
    """Return a body of /chat/ as a body of /v1/chat/completions for each conversation."""
    conversations = asked.get("messages")
    if not isinstance(conversations, list) or not all(
        isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
        for messages in conversations
    ):
        raise InvalidRequest("messages must be a list of conversations, each a list of messages", param="messages")
    sampling = _sampling(asked)
    top = sampling.pop("logprobs")
    common = sampling | _TOKENS_BY_ID | {"logprobs": top is not None}
    if top:
        common["top_logprobs"] = top
    if asked.get("tools"):
        common |= {"tools": asked["tools"], "tool_choice": "none"}
    for key in ("chat_template", "chat_template_kwargs"):
        if asked.get(key):
            common[key] = asked[key]
    return [common | {"messages": [_message(message) for message in conversation]} for conversation in conversations]


def generated(answers: Sequence[Json], n: int) -> Json:
    """Return the reply of /generate/ or /chat/, from a reply of vLLM for each prompt, or a reply for all."""
    choices = [choice for answer in answers for choice in answer["choices"]]
    prompt_ids = [
        answer["prompt_token_ids"] if "prompt_token_ids" in answer else choice["prompt_token_ids"]
        for answer in answers
        for choice in answer["choices"][::n]
    ]
    ranked = [_ranked(choice["logprobs"]) for choice in choices if choice.get("logprobs") is not None]
    has_all = len(ranked) == len(choices)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [choice["token_ids"] for choice in choices],
        "logprobs": [values for values, _ in ranked] if has_all else None,
        "logprob_token_ids": [ids for _, ids in ranked] if has_all else None,
    }


def scoring_bodies(asked: Json) -> list[Json]:
    """Return a body of /get_sequence_logprobs/ as a body of /v1/completions for each sequence."""
    sequences, lengths, top = asked.get("sequences"), asked.get("prompt_lengths"), asked.get("top_logprobs")
    top = _DEFAULT_TOP if top is None else top
    if not isinstance(sequences, list) or not isinstance(lengths, list) or len(sequences) != len(lengths):
        raise InvalidRequest("prompt_lengths must have an entry for each of sequences", param="prompt_lengths")
    for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        if not isinstance(sequence, list) or type(length) is not int or not 0 <= length <= len(sequence):
            raise InvalidRequest(
                f"prompt_lengths[{index}] = {shown(length)} is not between 0 and the length of its sequence",
                param="prompt_lengths",
            )
    if type(top) is not int or top < 1:
        raise InvalidRequest(f"top_logprobs = {shown(top)} must be a whole number of at least 1", param="top_logprobs")
    if asked.get("response_format", "json") not in ("json", "binary"):
        raise InvalidRequest("response_format is json or binary", param="response_format")
    temperature = asked.get("temperature", 1.0)
    common = {"max_tokens": 1, "temperature": temperature, "prompt_logprobs": top, "return_token_ids": True}
    return [common | {"prompt": [sequence]} for sequence in sequences]


def scored(answers: Sequence[Json], asked: Json) -> Json:
    """Return the reply of /get_sequence_logprobs/: the log-probs of each sequence after its prompt."""
    scores = [
        answer["choices"][0]["prompt_logprobs"][length:]
        for answer, length in zip(answers, asked["prompt_lengths"], strict=True)
    ]
    if asked.get("response_format") == "binary":
        return _scored_in_binary(scores, asked)
    ranked = [[_by_rank(position) for position in positions] for positions in scores]
    return {
        "logprobs": [[[value for _, value in items] for items in positions] for positions in ranked],
        "logprob_token_ids": [[[token for token, _ in items] for items in positions] for positions in ranked],
    }


def _scored_in_binary(scores: Sequence[Sequence[Json | None]], asked: Json) -> Json:
    top = asked.get("top_logprobs") or _DEFAULT_TOP
    lengths = [len(positions) for positions in scores]
    shape = (len(scores), max(lengths, default=0))
    values, ids = np.full((*shape, top), -np.inf, np.float32), np.zeros((*shape, top), np.int32)
    actual, actual_ids = np.full((*shape, 1), -np.inf, np.float32), np.zeros((*shape, 1), np.int32)
    for i, positions in enumerate(scores):
        completion = asked["sequences"][i][asked["prompt_lengths"][i] :]
        for t, (position, token_id) in enumerate(zip(positions, completion, strict=True)):
            for k, (ranked_id, value) in enumerate(_by_rank(position)[:top]):
                values[i, t, k], ids[i, t, k] = -np.inf if value is None else value, ranked_id
            if position is not None and str(token_id) in position:
                actual[i, t, 0], actual_ids[i, t, 0] = position[str(token_id)]["logprob"], token_id
    return {
        "logprobs_b64": _base64(values),
        "token_ids_b64": _base64(ids),
        "actual_logprobs_b64": _base64(actual),
        "actual_token_ids_b64": _base64(actual_ids),
        "shape": list(values.shape),
        "completion_lengths": lengths,
    }


def _sampling(asked: Json) -> Json:
    """Return the sampling parameters. Raise `InvalidRequest` where generation_kwargs is no object."""
    more = asked.get("generation_kwargs") or {}
    if not isinstance(more, dict):
        raise InvalidRequest(f"generation_kwargs is {type(more).__name__}, no object", param="generation_kwargs")
    wanted = {key: asked.get(key, default) for key, default in _SAMPLING.items()} | more
    if wanted["top_k"] == -1:
        wanted["top_k"] = 0
    if (regex := asked.get("structured_outputs_regex")) is not None:
        wanted["structured_outputs"] = {"regex": regex}
    return wanted


def _message(message: Json) -> Json:
    """Return a message with its images, which TRL sends as base64 of PNG files, as data URLs."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{part['image_pil']}"}}
        if part.get("type") == "image_pil"
        else part
        for part in content
    ]
    return message | {"content": parts}


def _ranked(logprobs: Json) -> Ranked:
    """Rank the log-probs of a choice of a completion or a chat, whose tokens are named by their ids."""
    positions: list[dict[int, float | None]]
    if "content" in logprobs:
        positions = [
            {token_id_of(token["token"]): token["logprob"] for token in (*item.get("top_logprobs", ()), item)}
            for item in logprobs["content"] or ()
        ]
    else:
        sampled = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        positions = [
            {token_id_of(name): value for name, value in {**(top or {}), token: logprob}.items()}
            for token, logprob, top in sampled
        ]
    ordered = [
        sorted(values.items(), key=lambda item: -np.inf if item[1] is None else -item[1]) for values in positions
    ]
    return [[value for _, value in items] for items in ordered], [[token for token, _ in items] for items in ordered]


def _by_rank(position: Json | None) -> list[tuple[int, Any]]:
    """Return token ids and log-probs of one position of a prompt, likeliest first; empty for its first token."""
    found = sorted((position or {}).items(), key=lambda item: item[1]["rank"])
    return [(int(token_id), ranked["logprob"]) for token_id, ranked in found]


def _base64(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")
