"""The digit-sorting task by an agent: the model answers, a tool looks at the answer, and the model may answer again.

The agent knows a base URL and a key, as any harness does. TRL's `rollout_func` is given what the gateway recorded of
its sessions: token ids and log-probabilities as sampled, with the tool's words masked.
"""

import asyncio
from collections.abc import Callable
from statistics import fmean
from typing import Any

import aiohttp

from examples.tiny_model import task
from trainer_client import BlockingRolloutClient, BlockingSessionGroups, trajectories_of
from trainer_client.sessions.calls import OpenSession
from trainer_client.sessions.exports import trl_fields

_TURNS = 2
_OUTAGE_S, _PAUSE_S, _CALL_S = 120.0, 0.5, 60.0

Messages = list[dict[str, str]]


async def solve(asked: Messages, session: OpenSession) -> float:
    """Run the agent. Return its reward: 1 for a right first answer, half of it for a right second one."""
    problem = asked[-1]["content"]
    said = list(asked)
    for turn in range(_TURNS):
        answer = await _answer(said, session)
        if answer == task.answer(problem):
            return 1.0 / (turn + 1)
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": misplaced(problem, answer)}]
    return 0.0


def misplaced(problem: str, answer: str) -> str:
    """Be the agent's tool: say how many digits stand where they should not, and the problem again."""
    right = task.answer(problem)
    wrong = sum(one != other for one, other in zip(right, answer.ljust(len(right)), strict=False))
    return f"{wrong} wrong: {problem}"


async def _answer(said: Messages, session: OpenSession) -> str:
    """Ask for a turn. A gateway that is restarted is asked again, as SDKs do."""
    body = {"messages": said, "max_tokens": task.MAX_ANSWER_TOKENS, "temperature": 1.0}
    headers, timeout = {"Authorization": f"Bearer {session.key}"}, aiohttp.ClientTimeout(total=_CALL_S)
    async with asyncio.timeout(_OUTAGE_S), aiohttp.ClientSession(timeout=timeout) as http:
        while True:
            try:
                async with http.post(f"{session.url}/chat/completions", json=body, headers=headers) as response:
                    response.raise_for_status()
                    return str((await response.json())["choices"][0]["message"]["content"] or "")
            except (aiohttp.ClientError, ConnectionError) as error:
                if isinstance(error, aiohttp.ClientResponseError) and error.status < 500:
                    raise
            await asyncio.sleep(_PAUSE_S)


class SortAgents:
    """Groups of agents at one gateway, a group for each prompt of a step."""

    def __init__(self, url: str) -> None:
        self._client = BlockingRolloutClient(url)

    def rollouts(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return the longest row of each session, in the order of TRL's prompts."""
        n = trainer.num_generations
        groups = BlockingSessionGroups(self._client, prompts[::n], solve, n=n, in_work=len(prompts) // n)
        ended = sorted(groups, key=lambda group: group.index)
        if short := [group for group in ended if group.is_short]:
            why = short[0].dropped, short[0].failures[:1]
            raise RuntimeError(f"{len(short)} groups have too few sessions: {why}")
        return trl_fields([trajectories_of(session)[0] for group in ended for session in group.sessions])


def reward(session_reward: list[float], log_metric: Callable[[str, float], None], **_: Any) -> list[float]:
    """Return TRL's rewards: those of the sessions."""
    log_metric("first_answers_right", fmean(one == 1.0 for one in session_reward))
    return session_reward
