"""Renders the conversation of a group to token ids, by the chat template of an engine of its model."""

from gateway.dialects.resumption.chat import RENDER
from gateway.dialects.submissions.words import Group
from gateway.dialects.token_generation import lacking
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.inquiries import Inquiries

_ASK_TIMEOUT_S = 60.0


class Rendering:
    """Asks the replicas of a group's model, once one serves."""

    def __init__(self, fleet: Fleet, inquiries: Inquiries, longest_wait_s: float) -> None:
        """`longest_wait_s` bounds the wait for a replica while none serves."""
        self._fleet = fleet
        self._inquiries = inquiries
        self._longest_wait_s = longest_wait_s

    async def render(self, group: Group) -> list[int]:
        """Return the prompt's token ids. Raise the engine's refusal, or `UnknownRoute` where no engine renders."""
        model, _ = self._fleet.asked(group.model)
        await self._fleet.serves_within(model, self._longest_wait_s)
        replicas = [replica for replica in self._fleet.alive if replica.info.model == model]
        able = [replica for replica in replicas if RENDER in replica.info.capabilities]
        if not able:
            raise lacking(f"{RENDER}, which `messages` need,", replicas)
        return list((await self._inquiries.ask(able, "POST", RENDER, group.rendering, _ASK_TIMEOUT_S))["token_ids"])
