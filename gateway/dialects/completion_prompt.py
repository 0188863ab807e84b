"""One prompt of /v1/completions as a rollout: the body for an engine, and the place of its samples in the reply."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from engines.engine import Json
from engines.errors import EngineRefused
from engines.types import ReplicaInfo
from gateway.dialects.part import Ask
from gateway.dialects.resumption.tokens import rest_sampling, whole_characters
from gateway.dialects.sampling import versioned_salt
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.replica import Replica

PATH = "/v1/completions"

_ASK_TIMEOUT_S = 60.0
# Fields with which vLLM refuses to stream, or streams in another shape.
_WHOLE_ONLY = ("prompt_logprobs", "echo", "use_beam_search")
_SHORT_TOKENS = 64  # two coarse chunks


def is_read_in_chunks(body: Json, limit: int, rollout: Rollout, info: ReplicaInfo, *, always: bool = False) -> bool:
    """True if this engine's reply to `body`, of at most `limit` tokens a sample, is read in chunks.

    Engines that we start send coarse chunks, which cost them nothing; the samples of one prompt even gain by it (vLLM
    0.26 made 9 % more tokens). A short single sample is read whole: it has few tokens to lose, and chunks cost this
    process three times the CPU; with `always` it is read in chunks too. A rest is read in chunks, however short: where
    engines die in a row, each is to add tokens.
    """
    if not (always or rollout.n > 1 or limit > _SHORT_TOKENS or rollout.goes_on) or not info.streams:
        return False
    return not [field for field in _WHOLE_ONLY if body.get(field) is not None and body[field] is not False]


@dataclass(kw_only=True)
class CompletionPrompt(Ask):
    """One prompt of a request: its place there, and the body that asks one replica for its completions."""

    request_id: str
    index: int
    limit: int

    @property
    def first(self) -> int:
        """Place of the first sample in the client's reply."""
        return self.index * self.rollout.n

    def reads_whole(self, replica: Replica) -> bool:
        return not is_read_in_chunks(self.body, self.limit, self.rollout, replica.info, always=self.is_submitted)

    async def asked(self, replica: Replica, *, streams: bool) -> tuple[str, Json]:
        """With token ids if that changes nothing else: a span counts tokens. Beside them vLLM leaves out an `echo`."""
        has_ids = bool(self.body.get("return_token_ids") or not self.body.get("echo"))
        salt = versioned_salt(self.body, replica, self.rollout.adapter)
        body = {**self.body, "cache_salt": salt, "return_token_ids": has_ids}
        if (before := self.before) is not None:
            made = before.token_ids
            if before.text and not streams:  # an engine without a tokenizer reports no text and cannot detokenise
                model = self.body.get("model")
                made = await whole_characters(made, partial(_detokenized, replica, model))
                before.num_read = len(made)
            body = rest_sampling(body | {"max_tokens": self.limit, "return_token_ids": True}, made, before.index)
            body |= {"prompt": [*self.prompt, *made]} if made else {}
        return PATH, body

    def named(self, error: EngineRefused) -> EngineRefused:
        if isinstance(inner := error.body.get("error"), dict):
            message = f"prompt[{self.index}]: {inner.get('message', '')}"
            error.body = {**error.body, "error": {**inner, "message": message}}
        return error

    def bare(self) -> Json:
        bare: Json = {"text": "", "logprobs": None, "prompt_logprobs": None, "token_ids": []}
        return bare | {"prompt_token_ids": self.read}

    def bare_head(self) -> Json:
        head = {"id": f"cmpl-{self.request_id}", "object": "text_completion", "created": int(time.time())}
        return head | {"model": self.body.get("model") or self.rollout.model}


async def _detokenized(replica: Replica, model: str | None, token_ids: list[int]) -> str:
    asked: dict[str, Any] = {"tokens": token_ids} | ({} if model is None else {"model": model})  # SGLang refuses null
    return str((await replica.engine.ask("POST", "/detokenize", asked, _ASK_TIMEOUT_S))["prompt"])
