"""The client of verl's agent loops: completions from a gateway in verl's terms."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils import normalize_token_ids
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from engines.errors import EngineFailed, InvalidRequest
from trainer_client.client import RolloutClient
from trainer_client.results import Completion
from trainer_client.sampling import SamplingParams
from trainer_client.verl.settings import Settings

_REMEMBERED = 10_000
_MEDIA = ("image_data", "video_data", "audio_data")
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
        """Return one completion.

        Raises the gateway's own error, which costs verl this prompt's group, `DeadlineExceeded`, `EngineFailed` where a
        /pause has aborted it, and `InvalidRequest` for images, video and audio.
        """
        for name in _MEDIA:
            if others.get(name):
                raise InvalidRequest(f"{name} was given, but the gateway takes only token ids", param=name)
        tokens = normalize_token_ids(prompt_ids)
        batch = self.client.generate(
            [tokens],
            _sampling(sampling_params, self._budget(len(tokens), sampling_params)),
            sessions=[self._session(request_id, tokens)],
            timeout_s=self._settings.rollout_timeout_s,
        )
        (rollout,) = await batch.gather()
        (completion,) = rollout.completions
        if completion.finish_reason == "abort":
            raise EngineFailed(f"request {request_id} was aborted, as by POST /pause?mode=abort: use mode=keep")
        oldest, newest = self._global_steps(completion)
        return TokenOutput(
            token_ids=completion.token_ids.tolist(),
            log_probs=None if completion.logprobs is None else completion.logprobs.tolist(),
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": newest, "min_global_steps": oldest, "max_global_steps": newest},
        )

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

    def _global_steps(self, completion: Completion) -> tuple[int | None, int | None]:
        """Return the steps of the oldest and the newest weights of the tokens; None without tokens."""
        if not len(completion.token_ids):
            return None, None
        versions = [span.version for span in completion.spans]
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
