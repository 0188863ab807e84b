"""What agent loops of `trainer_mode=gateway` call for tokens: verl's own client interface, answered by a gateway."""

import asyncio
from typing import Any

from verl.utils import normalize_token_ids
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from engines.errors import DeadlineExceeded
from trainer_client.results import Completion
from trainer_client.verl.settings import Settings
from trainer_client.verl.token_source import TokenSource, refuse_media

_ABORTED_PAUSE_S = 0.5


class GatewayLLMClient(LLMServerClient):
    """One per agent loop worker, to which it is pickled.

    `version_of_step_0` and `max_model_len` are those of `TokenSource`.
    """

    def __init__(self, config: Any, settings: Settings, *, version_of_step_0: int, max_model_len: int) -> None:
        super().__init__(config=config)
        self._timeout_s = settings.rollout_timeout_s
        self._source = TokenSource(settings, config.actor_rollout_ref.rollout, max_model_len)
        self._source.version_of_step_0 = version_of_step_0

    async def close(self) -> None:
        """Drop the connections. verl's workers end with theirs."""
        await self._source.close()

    @rollout_trace_op
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> TokenOutput:
        """One completion. What an abort cut short goes on from where it stopped, by whatever weights are served then.

        Raises the gateway's own error, which costs verl this prompt's group, and `DeadlineExceeded`.
        """
        refuse_media(image_data=image_data, video_data=video_data, audio_data=audio_data)
        prompt_ids = normalize_token_ids(prompt_ids)
        budget = self._source.budget(len(prompt_ids), sampling_params)
        parts: list[Completion] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    done = [token_id for part in parts for token_id in part.token_ids.tolist()]
                    left = budget - len(done)
                    parts.append(await self._source.complete(request_id, prompt_ids + done, sampling_params, left))
                    left -= len(parts[-1].token_ids)
                    if parts[-1].finish_reason != "abort" or left <= 0:
                        return self._source.output(parts)
                    await asyncio.sleep(_ABORTED_PAUSE_S)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"request {request_id}: no whole completion within {self._timeout_s:g} s; "
                f"{len(parts)} parts were aborted"
            ) from error
