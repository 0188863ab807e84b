"""The routes of TRL's own server, which TRL up to 1.10 calls (`gateway.trl_legacy`). Their paths end in a slash.

Weights come through `trainer_client.trl_legacy`. The old client broadcasts each tensor over a group that the server
opens, without a deadline; its routes are refused here.
"""

from collections.abc import Sequence

from aiohttp import web

from engines.engine import Json
from engines.errors import WeightUpdateConflict
from gateway.dialects.chat import Chat
from gateway.dialects.completions import Completions
from gateway.dialects.words.trl_legacy import chat_bodies, completion_body, generated, scored, scoring_bodies
from gateway.fleet.fleet import Fleet
from gateway.fleet.together import together
from gateway.http.access import Access
from gateway.http.json_body import read_object, reply
from gateway.http.middleware import Measurement
from gateway.http.request_id import request_id
from gateway.weights.coordinator import WeightCoordinator

_REMEDY = (
    "TRL up to 1.10 syncs weights with `from trainer_client import trl_legacy; trl_legacy.install()` before the "
    "trainer is made; TRL from 1.11 on needs nothing"
)


class TrlLegacyRoutes:
    """Translates the legacy routes for `Completions` and `Chat`."""

    def __init__(
        self,
        fleet: Fleet,
        weights: WeightCoordinator,
        completions: Completions,
        chat: Chat,
        measurement: Measurement,
    ) -> None:
        self._measurement = measurement
        self._fleet = fleet
        self._weights = weights
        self._completions = completions
        self._chat = chat

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        router.add_get("/health/", self._health)
        router.add_get("/get_world_size/", access.for_admin(self._world_size))
        router.add_post("/generate/", access.for_inference(self._generate))
        router.add_post("/chat/", access.for_inference(self._converse))
        router.add_post("/get_sequence_logprobs/", access.for_inference(self._score))
        router.add_post("/reset_prefix_cache/", access.for_admin(self._reset_prefix_cache))
        router.add_post("/close_communicator/", access.for_admin(self._close_communicator))
        for path in ("/init_communicator/", "/update_named_param/"):
            router.add_post(path, access.for_admin(self._refuse_weights))

    async def _health(self, request: web.Request) -> web.Response:
        """Reply 200 once the fleet is ready, else 503. TRL polls without a limit until it gets a 200."""
        ready = self._fleet.is_ready
        return reply({"status": "ok" if ready else "starting"}, 200 if ready else 503)

    async def _world_size(self, request: web.Request) -> web.Response:
        """Reply with the number of workers in a weight transfer group."""
        return reply({"world_size": await self._weights.world_size()})

    async def _generate(self, request: web.Request) -> web.Response:
        """Generate samples of prompts, in the dialect of TRL's own server."""
        body = completion_body(await read_object(request))
        prompts = self._completions.decode(body, request_id(request))
        answer = await self._completions.generate(self._completions.parts_of(prompts))
        self._count(request, prompts[0].rollout.model, [answer])
        return reply(generated([answer], prompts[0].rollout.n))

    async def _converse(self, request: web.Request) -> web.Response:
        """Generate samples of conversations, in the dialect of TRL's own server."""
        bodies = chat_bodies(await read_object(request))
        rollouts = [self._chat.decode(body, f"{request_id(request)}-{index}") for index, body in enumerate(bodies)]
        calls = (self._chat.generate(rollout, body) for rollout, body in zip(rollouts, bodies, strict=True))
        answers = await together(calls)
        if not rollouts:
            return reply(generated(answers, 1))
        self._count(request, rollouts[0].model, answers)
        return reply(generated(answers, rollouts[0].n))

    async def _score(self, request: web.Request) -> web.Response:
        """Reply with the log-probs of given sequences."""
        asked = await read_object(request)
        prompts = [
            self._completions.decode(body, request_id(request), first=index)
            for index, body in enumerate(scoring_bodies(asked))
        ]
        answers = await together(self._completions.generate(prompt) for prompt in prompts)
        if prompts:
            self._count(request, prompts[0][0].rollout.model, answers)
        return reply(scored(answers, asked))

    def _count(self, request: web.Request, model: str, answers: Sequence[Json]) -> None:
        """Count the tokens in the metrics and against the key's limits."""
        for answer in answers:
            self._measurement.count_tokens(request, model, answer.get("usage"))

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Empty the prefix caches of all replicas."""
        success = await self._weights.pauses.reset_prefix_cache()
        return reply({"message": f"Request received, resetting prefix cache status: {success}"})

    async def _close_communicator(self, request: web.Request) -> web.Response:
        """Reply that the group is closed. TRL calls this at its end, with or without a group."""
        return reply({"message": "Request received, closing communicator"})

    async def _refuse_weights(self, request: web.Request) -> web.Response:
        """Refuse the old weight calls, with the remedy."""
        raise WeightUpdateConflict(f"{request.path}: {_REMEDY}")
