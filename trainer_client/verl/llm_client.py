"""What agent loops of `trainer_mode=gateway` call for tokens: verl's own client interface, answered by a gateway."""

from typing import Any

from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from trainer_client.verl.settings import Settings
from trainer_client.verl.token_source import TokenSource


class GatewayLLMClient(LLMServerClient):
    """One per agent loop worker, to which it is pickled.

    `version_of_step_0` and `max_model_len` are those of `TokenSource`.
    """

    def __init__(self, config: Any, settings: Settings, *, version_of_step_0: int, max_model_len: int) -> None:
        super().__init__(config=config)
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
        **others: Any,
    ) -> TokenOutput:
        """Return one completion. The rest of an aborted completion is made by the weights served then.

        Raises the gateway's own error, which costs verl this prompt's group, and `DeadlineExceeded`.
        """
        return await self._source.generate(request_id, prompt_ids, sampling_params, resumes=True, others=others)
