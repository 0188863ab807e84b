"""The agent of examples/sort_agent.py for verl: an agent loop that gives it a session, and returns what was recorded.

Another agent takes the place of `solve`: a coroutine that knows the session's URL and key, and returns a reward.
"""

from typing import Any

from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput

from examples.sort_agent import solve
from trainer_client import Sessions, Trajectory, trajectories_of

_LAST_CALLS_S = 30.0


class SortAgentLoop(AgentLoopBase):
    """verl makes one for each sample of a prompt, and all samples of a batch run at once."""

    async def run(self, sampling_params: dict[str, Any], *, raw_prompt: Any, **_: Any) -> list[AgentLoopOutput]:
        """Return the rows of a session, that with its last call at the end: verl takes the score from there.

        What the agent raises fails the group of its prompt, for which verl asks again.
        """
        gateway = self.server_manager  # that of trainer_mode=gateway
        sessions = Sessions(gateway.client)
        session = await sessions.begin()
        try:
            reward = await solve(list(raw_prompt), session)
            await sessions.freeze(session.id, reward, wait_s=_LAST_CALLS_S)
            rows = trajectories_of(await sessions.read(session.id))
        except BaseException:
            await sessions.drop(session.id)
            raise
        await sessions.ack(session.id)
        if not rows:
            raise RuntimeError(f"session {session.id} has no token to train")
        return [self._output(row, gateway.version_of_step_0) for row in sorted(rows, key=lambda row: row.calls[-1])]

    def _output(self, row: Trajectory, version_of_step_0: int) -> AgentLoopOutput:
        made = slice(self.rollout_config.response_length)
        oldest, newest = row.version_range
        return AgentLoopOutput(
            prompt_ids=row.prompt_ids.tolist(),
            response_ids=row.completion_ids[made].tolist(),
            response_mask=row.mask[made].tolist(),
            response_logprobs=row.logprobs[made].tolist(),
            reward_score=row.reward,
            num_turns=2 * len(row.calls),
            metrics={},
            extra_fields={
                "min_global_steps": oldest - version_of_step_0,
                "max_global_steps": newest - version_of_step_0,
                "reward_extra_info": {},
            },
        )
