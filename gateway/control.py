"""The control plane on Serve's own HTTP port: the fleet's status. It changes nothing."""

import asyncio
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, HTTPException, Response
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse

_ANSWER_S = 10.0

# FastAPI's pages of documentation load their scripts from elsewhere, and are blank offline.
api = FastAPI(
    title="rollout-gateway",
    description="Status of the fleet. Rollouts and weights go to the rollout URL.",
    docs_url=None,
    redoc_url=None,
)


# Before the class: Serve's decorator copies its methods with the names that the module has by then.
async def _answer_of(asked: "DeploymentResponse[Any]") -> Any:
    """Return the gateway's answer. Raise 504 where there is none in time."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await asked
    except TimeoutError:
        raise HTTPException(
            504, f"the gateway gave no answer within {_ANSWER_S:g} s: it starts, hangs or is gone; see its log"
        ) from None


@serve.ingress(api)
class Control:
    """Asks the gateway; holds no state."""

    def __init__(self, gateway: DeploymentHandle) -> None:
        self._gateway = gateway

    @api.get("/status")
    async def status(self) -> dict[str, Any]:
        """Replicas and their states, weight version, queue."""
        report: dict[str, Any] = await _answer_of(self._gateway.status.remote())
        return report

    @api.get("/health")
    async def health(self, response: Response) -> dict[str, bool]:
        """200 when the fleet is complete, else 503."""
        ready = (await self.status())["ready"]
        response.status_code = 200 if ready else 503
        return {"ready": ready}

    @api.get("/url")
    async def url(self) -> dict[str, str]:
        """The rollout URL that trainers are pointed at."""
        return {"url": await _answer_of(self._gateway.url.remote())}

    @api.get("/prometheus/targets")
    async def targets(self) -> list[dict[str, Any]]:
        """Prometheus' HTTP service discovery: the gateway, whose /metrics has the engines' pages too."""
        address = urlsplit(await _answer_of(self._gateway.url.remote())).netloc
        return [{"targets": [address], "labels": {"application": serve.get_replica_context().app_name}}]
