"""/v1/completions of vLLM's dialect: a request becomes one rollout per prompt; the replies are joined prompt-major."""

import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from engines.engine import Json
from engines.errors import InvalidRequest
from gateway.config.schema import GatewayConfig
from gateway.dialects.completion_prompt import DEFAULT_MAX_TOKENS, CompletionPrompt
from gateway.dialects.freshness import FIELDS, read_freshness
from gateway.dialects.parallel import gathered, merged
from gateway.dialects.resumption.cut_stream import CutStream
from gateway.dialects.runner import Runner
from gateway.dialects.sampling import asks_vllm, check_sampling
from gateway.dialects.usage import Usage, wants_usage, with_usage_rule
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.scheduler import using

_CHARACTERS_PER_TOKEN = 4


class Completions:
    """Decodes requests, runs their prompts, joins the replies."""

    def __init__(self, config: GatewayConfig, fleet: Fleet, runner: Runner) -> None:
        self._config = config
        self._fleet = fleet
        self._runner = runner

    def decode(self, body: Json, request_id: str, session: str = "", first: int = 0) -> list[CompletionPrompt]:
        """The prompts of a request. Raises `InvalidRequest` before any replica has work, naming field and prompt.

        A turn of `session` has one prompt; the prompts of a batch are spread over all replicas.
        Prompts are numbered from `first`.
        """
        model, adapter = self._fleet.asked(body.get("model") or None)
        n = check_sampling(body, self._config.max_n)
        max_len = common_room(self._fleet, model)
        fresh = read_freshness(body, self._fleet, model)
        rest = {key: value for key, value in body.items() if key not in ("prompt", "stream", *FIELDS)}
        prompts, values = [], _prompt_list(body, self._config.max_prompts)
        for index, value in enumerate(values, first):
            length = _checked_length(index, value, max_len)
            limit = _limit(body, max_len)
            rollout = Rollout(
                request_id=f"{request_id}-{index}",
                request=request_id,
                model=model,
                n=n,
                tokens=length + n * limit,
                prompt_tokens=length,
                needs_ids=asks_vllm(body),
                min_version=fresh.min_version,
                max_staleness=fresh.max_staleness,
                session=session if len(values) == 1 else "",
                adapter=adapter,
            )
            prompts.append(
                CompletionPrompt(
                    self._runner, self._config, request_id, index, rollout, {**rest, "prompt": value}, limit
                )
            )
        return prompts

    async def generate(self, prompts: Sequence[CompletionPrompt]) -> Json:
        """One reply for all prompts. The first prompt that fails ends the others."""
        answers = await gathered(self._runner.generate(prompt) for prompt in prompts)
        for choice in (choice for answer in answers for choice in answer["choices"]):
            _hide_ids(choice, prompts[0].body)
        return _joined(answers, prompts)

    async def stream(self, prompts: Sequence[CompletionPrompt], usage: Usage | None = None) -> AsyncGenerator[Json]:
        """Chunks of all prompts in the order of arrival, numbered as if one engine made them. Counts up `usage`."""
        usage, last = Usage() if usage is None else usage, Json()
        async with aclosing(merged(self._shown(prompt, usage) for prompt in prompts)) as chunks:
            async for last in chunks:
                yield last
        if wants_usage(prompts[0].body):
            yield {**last, "choices": [], "usage": usage.total()}

    async def _shown(self, prompt: CompletionPrompt, usage: Usage) -> AsyncGenerator[Json]:
        async with aclosing(self._stream_one(prompt)) as chunks:
            async for chunk in chunks:
                usage.add_chunk(prompt.index, chunk.get("usage"))
                if chunk["choices"]:
                    for choice in chunk["choices"]:
                        _hide_ids(choice, prompt.body)
                    yield with_usage_rule(chunk, prompt.body)

    async def _stream_one(self, prompt: CompletionPrompt) -> AsyncGenerator[Json]:
        usage, rest_usage = Json(), Usage()
        cut = CutStream(prompt.indexes, prompt.rollout.adapter, inexact=prompt.inexact, has_ids=prompt.has_ids)
        with using(prompt.rollout):
            async with aclosing(self._runner.stream(prompt, cut)) as chunks:
                async for chunk in chunks:
                    usage = chunk.get("usage") or usage
                    yield chunk
            rests = [prompt.rest_of(made, index) for index, made in cut.cut_off().items()]
            if rests:
                async with aclosing(self.stream(rests, rest_usage)) as chunks:
                    async for chunk in chunks:
                        for choice in chunk["choices"]:
                            cut.follow(choice)
                        yield chunk | {"usage": cut.usage(usage, rest_usage.total())}
            if cut.is_cut:
                yield chunk | {"choices": [], "usage": cut.usage(usage, rest_usage.total())}


def common_room(fleet: Fleet, model: str) -> int | None:
    """The smallest `max_model_len` among the replicas of a model; None where no replica reports it."""
    lengths = [replica.info.max_model_len for replica in fleet.alive if replica.info.model == model]
    return min((length for length in lengths if length is not None), default=None)


def _limit(body: Json, max_len: int | None) -> int:
    """Most tokens of a sample. As in vLLM, null is the default, and `max_completion_tokens` is of conversations."""
    asked: int = DEFAULT_MAX_TOKENS if body.get("max_tokens") is None else body["max_tokens"]
    return min(asked, max_len or asked)


def _prompt_list(body: Json, max_prompts: int) -> list[Any]:
    """Every accepted form of `prompt` as a list of prompts, each a string or a list of token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and len(prompt) > max_prompts and not isinstance(prompt[0], int):
        raise InvalidRequest(
            f"prompt has {len(prompt)} prompts, more than gateway.max_prompts = {max_prompts}: send fewer at a time",
            param="prompt",
        )
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(
            f"prompt is {'an empty list' if prompt == [] else type(prompt).__name__}: send text, token ids, or a list "
            "of either",
            param="prompt",
        )
    return [prompt] if isinstance(prompt[0], int) else prompt


def _checked_length(index: int, value: Any, max_len: int | None) -> int:
    """Length in tokens; an estimate for text, which only an engine can tokenise."""
    if not isinstance(value, str | list):
        raise InvalidRequest(f"prompt[{index}] is a {type(value).__name__}, not text or token ids", param="prompt")
    if not value:
        raise InvalidRequest(f"prompt[{index}] is empty: an engine needs at least one token", param="prompt")
    if isinstance(value, str):
        return math.ceil(len(value) / _CHARACTERS_PER_TOKEN)
    if max_len is not None and len(value) >= max_len:
        raise InvalidRequest(
            f"prompt[{index}] has {len(value)} tokens, which leaves none of max_model_len = {max_len} for a "
            "completion: shorten it, or serve with a larger engine.max_model_len",
            param="prompt",
        )
    return len(value)


def _hide_ids(choice: Json, body: Json) -> None:
    """Remove token ids, which are always needed here, for clients that did not ask for them."""
    if not body.get("return_token_ids"):
        choice |= {"token_ids": None, "prompt_token_ids": None}


def _joined(replies: Sequence[Json], prompts: Sequence[CompletionPrompt]) -> Json:
    """One reply, prompt-major: the samples of prompt i begin at i*n."""
    choices, usage = [], Usage()
    for answer, prompt in zip(replies, prompts, strict=True):
        usage.add_chunk(prompt.index, answer.get("usage"))
        for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"])):
            choice["index"] += prompt.index * prompt.rollout.n
            choices.append(choice)
    whole = {"id": f"cmpl-{prompts[0].request_id}", "created": int(time.time()), "choices": choices}
    return {**replies[0], **whole, "usage": usage.total()}
