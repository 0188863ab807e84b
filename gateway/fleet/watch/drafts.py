"""The drafts of replicas that decode speculatively: their weight versions, their acceptance, and its falls."""

import asyncio
import time
from weakref import WeakKeyDictionary

import structlog

from engines.engine import Json
from engines.errors import DeadlineExceeded, EngineError, EngineFailed, EngineRefused
from engines.types import EngineKind
from gateway.config.schema import FleetConfig
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.fleet.replica import Replica
from gateway.fleet.watch.acceptance import Acceptance, Share
from gateway.fleet.watch.engine_page import read_largest, read_total

log = structlog.get_logger()

_LOOK_S = 10.0
_DRAFTED = ("vllm:spec_decode_num_draft_tokens_total",)
_ACCEPTED = ("vllm:spec_decode_num_accepted_tokens_total",)
# SGLang has the share itself, of its last steps. Its tokens are counted step by step.
_RATE = ("sglang:spec_accept_rate",)
_MADE = ("sglang:realtime_tokens_total",)


class _Draft:
    """What is known of one replica's draft. `version` is that of its own weights; None where it is unknown."""

    def __init__(self, alarm: float) -> None:
        self.report: Json | None = None
        self.reported_at: int | None = None
        self.version: int | None = None
        self.acceptance = Acceptance(alarm)
        self.drafted = 0.0
        self.accepted = 0.0
        self._made: float | None = None

    def count(self, page: str) -> bool:
        """Read the counters of an engine's page; return False where it has none."""
        drafted, accepted = read_total(page, _DRAFTED), read_total(page, _ACCEPTED)
        if drafted is not None and accepted is not None:
            self.drafted, self.accepted = drafted, accepted
            return True
        rate, made = read_largest(page, _RATE), read_total(page, _MADE)
        if rate is None or made is None:
            return False
        fresh = max(0.0, made - (made if self._made is None else self._made))
        self.drafted, self.accepted, self._made = self.drafted + fresh, self.accepted + fresh * rate, made
        return True

    @property
    def summary(self) -> str:
        """The state of the draft's own weights: none, shared, updated, frozen since a version, or unknown."""
        weights = str(self.report["weights"]) if self.report else "unknown"
        return f"frozen since version {self.version}" if weights == "frozen" and self.version is not None else weights

    def note(self, report: Json | None, version: int) -> None:
        """Take the worker's report on the draft beside a target of this version."""
        self.report, self.reported_at = report, version
        if report is None:
            return
        if report["weights"] == "updated":
            self.version = version
        elif report["weights"] == "frozen" and not report["loads"]:
            self.version = 0  # the checkpoint's
        elif report["weights"] != "frozen":
            self.version = None


class Drafts:
    """Looks at each replica that decodes speculatively, every ten seconds."""

    def __init__(self, config: FleetConfig, fleet: Fleet, metrics: Metrics) -> None:
        self._config = config
        self._fleet = fleet
        self._metrics = metrics
        self._drafts: WeakKeyDictionary[Replica, _Draft] = WeakKeyDictionary()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Read the counters of all drafts once, and report falls."""
        found = [replica for replica in self._fleet.alive if _may_speculate(replica)]
        await asyncio.gather(*map(self._look_at, found))
        self._metrics.observe_drafts(
            {replica: report for replica in self._fleet.replicas if (report := self.report(replica))}
        )

    def report(self, replica: Replica) -> Json | None:
        """Return the replica's draft for `status`; None where it has none."""
        draft = self._drafts.get(replica)
        if draft is None:
            return None
        found, reference = draft.report or {}, draft.acceptance.reference
        return {
            "method": found.get("method", replica.info.draft),
            "weights": found.get("weights", "unknown"),
            "summary": draft.summary,
            "version": draft.version,
            "shared": found.get("shared", []),
            "reason": found.get("reason", ""),
            "acceptance": _rounded(draft.acceptance.share),
            "reference": reference and {"acceptance": _rounded(reference.share), "version": reference.version},
        }

    async def _look_at(self, replica: Replica) -> None:
        version = replica.weight_version
        if version is None:
            return
        draft = self._drafts.get(replica) or _Draft(self._config.acceptance_alarm)
        try:
            page = await replica.engine.metrics(self._config.probe_timeout_s)
            counts = draft.count(page)
            if not counts and not replica.info.draft:
                return
            self._drafts[replica] = draft
            if draft.reported_at != version:
                draft.note(await self._report_of(replica), version)
        except (EngineError, DeadlineExceeded) as error:
            log.info("the draft of a replica was not read", replica=replica.replica_id, error=str(error))
            return
        if counts and replica.weight_version == version:
            fall = draft.acceptance.see(time.monotonic(), draft.drafted, draft.accepted, version)
            if fall is not None:
                self._tell(replica, *fall)

    async def _report_of(self, replica: Replica) -> Json | None:
        """Return the worker's report; None from an external server whose worker is not ours, or of a release before."""
        try:
            return await replica.engine.report_draft(self._config.probe_timeout_s)
        except (EngineFailed, EngineRefused) as error:
            log.info("an engine does not say what its draft holds", replica=replica.replica_id, error=str(error))
            return None

    def _tell(self, replica: Replica, before: Share, now: Share) -> None:
        text = (
            f"acceptance of the draft fell from {before.share:.0%} at version {before.version} to {now.share:.0%} at "
            f"version {now.version}: tokens are right, and come slower"
        )
        summary = self._drafts[replica].summary
        text += f"; the draft is {summary}" if "frozen" in summary else ""
        log.warning("draft acceptance fell", replica=replica.replica_id, reason=text)
        self._fleet.events.add(replica.replica_id, text)
        self._metrics.draft_acceptance_falls.labels(replica.label).inc()


def _may_speculate(replica: Replica) -> bool:
    """True for an engine with a draft, and for an external server, which is known by its page alone."""
    return bool(replica.info.draft) or replica.info.kind is EngineKind.EXTERNAL


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 3)
