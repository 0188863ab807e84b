"""The client of verl's agent loops: completions from a gateway in verl's terms."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils import normalize_token_ids
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from engines.errors import DeadlineExceeded, EngineFailed, InvalidRequest
from trainer_client.client import RolloutClient
from trainer_client.results import Completion
from trainer_client.sampling import SamplingParams
from trainer_client.verl.settings import Settings

_REMEMBERED = 10_000
_ABORTED_PAUSE_S = 0.5
_MEDIA = ("image_data", "video_data", "audio_data")
_STOP_REASONS = {"stop": "completed", "length": "completed", "abort": "aborted"}
"""Names of verl's vLLM server."""
_OWN_NAMES = ("temperature", "top_p", "min_p", "repetition_penalty", "min_tokens", "seed", "stop", "stop_token_ids")


class GatewayLLMClient(LLMServerClient):
    """The client of one agent loop worker, to which it is pickled.

    `max_model_len` is the engines', prompt and response together.
    """

    def __init__(self, config: Any, settings: Settings, *, version_of_step_0: int, max_model_len: int) -> None:
        super().__init__(config=config)
        self.version_of_step_0 = version_of_step_0
        """The gateway's weight version minus verl's global step, constant from a run's first sync on."""
        self._settings = settings
        self._rollout = config.actor_rollout_ref.rollout
        self._max_model_len = max_model_len
        self._client: RolloutClient | None = None
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "_sessions": OrderedDict()}

    @property
    def client(self) -> RolloutClient:
        """The client of the gateway, also for loops of agents, made in the process that first uses it."""
        if self._client is None:
            self._client = RolloutClient(self._settings.url, max_in_flight=self._settings.max_in_flight)
        return self._client

    async def close(self) -> None:
        """Drop the connections. verl's workers never call this: theirs end with the process."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    @rollout_trace_op
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        **others: Any,
    ) -> TokenOutput:
        """Return one completion. What an abort cut short goes on from its tokens, with the weights served then.

        Raises the gateway's own error, which costs verl this prompt's group, `InvalidRequest` for images, video and
        audio, and `DeadlineExceeded`.
        """
        for name in _MEDIA:
            if others.get(name):
                raise InvalidRequest(f"{name} was given, but the gateway takes only token ids", param=name)
        tokens, parts, params = normalize_token_ids(prompt_ids), list[Completion](), sampling_params
        left = self._budget(len(tokens), sampling_params)
        try:
            async with asyncio.timeout(self._settings.rollout_timeout_s):
                while True:
                    part = await self._complete(request_id, tokens, params, left)
                    parts.append(part)
                    tokens, left = tokens + part.token_ids.tolist(), left - len(part.token_ids)
                    if least := params.get("min_tokens"):
                        params = {**params, "min_tokens": max(0, least - len(part.token_ids))}
                    if part.finish_reason != "abort" or left <= 0:
                        return self._output(parts)
                    await asyncio.sleep(_ABORTED_PAUSE_S)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"request {request_id}: no whole completion within {self._settings.rollout_timeout_s:g} s; "
                f"{len(parts)} parts were aborted"
            ) from error

    async def _complete(
        self, request_id: str, prompt_ids: list[int], sampling_params: Mapping[str, Any], max_tokens: int
    ) -> Completion:
        batch = self.client.generate(
            [prompt_ids],
            _sampling(sampling_params, max_tokens),
            sessions=[self._session(request_id, prompt_ids)],
            timeout_s=self._settings.rollout_timeout_s,
        )
        (rollout,) = await batch.gather()
        return rollout.completions[0]

    def _session(self, request_id: str, prompt_ids: Sequence[int]) -> str:
        """Return the session of a request, derived from its first prompt.

        So all turns of a trajectory (one `request_id`) and all samples of a prompt, which verl requests one by one, go
        to the replica with their prefix.
        """
        session = self._sessions.pop(request_id, "") or hashlib.sha256(repr(prompt_ids).encode()).hexdigest()[:32]
        self._sessions[request_id] = session
        while len(self._sessions) > _REMEMBERED:
            self._sessions.popitem(last=False)
        return session

    def _budget(self, prompt_tokens: int, sampling_params: Mapping[str, Any]) -> int:
        """Return the limit of new tokens: the requested one, else the limit of verl's servers. At least 1."""
        asked = sampling_params.get("max_tokens") or sampling_params.get("max_new_tokens")
        if asked is None:
            room = self._rollout.prompt_length + self._rollout.response_length - prompt_tokens
            asked = min(self._rollout.response_length, room)
        return max(1, min(int(asked), self._max_model_len - prompt_tokens))

    def _output(self, parts: Sequence[Completion]) -> TokenOutput:
        """Return the parts of one completion as verl's output."""
        last = parts[-1]
        log_probs = None
        if last.logprobs is not None:
            log_probs = [value for part in parts if part.logprobs is not None for value in part.logprobs.tolist()]
        oldest, newest = self._global_steps(parts)
        return TokenOutput(
            token_ids=[token_id for part in parts for token_id in part.token_ids.tolist()],
            log_probs=log_probs,
            stop_reason=_STOP_REASONS.get(last.finish_reason, last.finish_reason),
            num_preempted=len(parts) - 1,
            extra_fields={"global_steps": newest, "min_global_steps": oldest, "max_global_steps": newest},
        )

    def _global_steps(self, parts: Sequence[Completion]) -> tuple[int | None, int | None]:
        """Return the steps of the oldest and the newest weights of the tokens; None without tokens."""
        if not any(len(part.token_ids) for part in parts):
            return None, None
        versions = [span.version for part in parts for span in part.spans]
        if not versions:
            raise EngineFailed(
                f"{self._settings.url} reports no weight versions with its completions: is it a rollout gateway?"
            )
        return min(versions) - self.version_of_step_0, max(versions) - self.version_of_step_0


def _sampling(params: Mapping[str, Any], max_tokens: int) -> SamplingParams:
    """Return verl's sampling parameters as ours; unknown names are passed on."""
    rest = {name: value for name, value in params.items() if name not in ("max_tokens", "max_new_tokens")}
    named = {name: value for name in _OWN_NAMES if (value := rest.pop(name, None)) is not None}
    return SamplingParams(
        max_tokens=max_tokens,
        top_k=max(0, int(rest.pop("top_k", 0))),  # verl says -1 for all tokens
        logprobs=bool(rest.pop("logprobs", False)),
        ignore_eos=bool(rest.pop("ignore_eos", False)),
        extra=rest,
        **named,
    )
