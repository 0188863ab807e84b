"""Judges canary readings, as pure functions over numbers; `canary.py` asks for them.

A distance is the mean absolute difference of log-probs, in nats a token. Two kinds are measured: between a replica and
its peers, which should be noise, and between a replica and itself before the update, which should be more than that.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from engines.engine import Json

Key = TypeVar("Key")

Logprobs = tuple[float, ...]

# Healthy replicas differ by about the noise, and measurements of noise vary, so three times the noise is tolerated. The
# previous version is distinguishable when half the distance to it exceeds twice the noise.
_NOISES = 3.0
_TOLD_APART = 4.0
# Engines compute log-probs in float32, so this much noise is always assumed.
_ROUNDING = 1e-5


class Result(StrEnum):
    """The outcome of a check of a replica's weights."""

    VERIFIED = "verified"
    UNCHANGED = "unchanged"  # equal to its peers, but the update moved log-probs by no more than noise
    NO_PEER = "no peer"  # it moved, but there was no peer to compare it with
    UNVERIFIED = "unverified"  # it cannot be asked
    FAILED = "failed"
    LOST = "lost"  # it is gone, whatever it held


@dataclass(frozen=True, slots=True)
class Reading:
    """One replica's canary: finite log-probs of all tokens but the first."""

    version: int
    logprobs: Logprobs
    seconds: float = 0.0

    def apart(self, other: "Reading") -> float:
        return distance(self.logprobs, other.logprobs)


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a check of one replica. A distance is None where there was nothing to compare with."""

    result: Result
    reason: str = ""
    to_peers: float | None = None
    to_previous: float | None = None
    to_trainer: float | None = None
    tolerance: float | None = None
    noise: float | None = None
    seconds: float | None = None
    is_late: bool = False

    @property
    def may_serve(self) -> bool:
        return self.result not in (Result.FAILED, Result.LOST)

    @property
    def is_far(self) -> bool:
        """True where its log-probs are farther from its peers' than noise explains."""
        return self.to_peers is not None and self.tolerance is not None and self.to_peers > self.tolerance

    def excused_if_late(self) -> "Finding":
        """Return a late finding as unverified: an engine full of rollouts may be late and healthy."""
        return replace(self, result=Result.UNVERIFIED) if self.is_late else self

    def report(self) -> Json:
        """Return the finding as JSON; distances are in nats a token."""
        names = ("to_peers", "to_previous", "to_trainer", "tolerance", "noise", "seconds")
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {
            "result": self.result.value,
            "reason": self.reason,
            **{name: float(f"{value:.4g}") for name, value in values.items()},
        }


UNASKED = Finding(Result.UNVERIFIED, "weights.canary.enabled is false")


def judge(
    readings: Mapping[Key, Reading],
    previous: Mapping[Key, Reading],
    *,
    noise: float,
    elsewhere: Sequence[Reading] = (),
    trainers: Logprobs | None = None,
    trainers_before: Reading | None = None,
) -> dict[Key, Finding]:
    """Return a finding for each of `readings`, which are of peers at one version.

    `previous` has their readings before the update, `elsewhere` accepted readings of more peers at this version.
    `noise` is the distance between readings of the same weights.
    """
    moved = {key: readings[key].apart(previous[key]) for key in readings if key in previous}
    latest = max((reading.version for reading in previous.values()), default=0)
    scale = Scale.of(noise, [value for key, value in moved.items() if previous[key].version == latest])
    stale = {key for key, value in moved.items() if scale.is_told_apart and value <= scale.still}
    current = {key: reading for key, reading in readings.items() if key not in stale}
    centre = _centre([*elsewhere, *current.values()], scale.tolerance)
    findings = {}
    for key, reading in readings.items():
        peers = [*elsewhere, *(other for name, other in current.items() if name != key)]
        finding = Finding(
            Result.VERIFIED,
            to_peers=_to_peers(reading, centre, peers),
            to_previous=moved.get(key),
            to_trainer=distance(reading.logprobs, trainers) if trainers else None,
            tolerance=scale.tolerance,
            noise=scale.noise,
            seconds=reading.seconds,
        )
        move = _Move.of(reading, previous.get(key), trainers, trainers_before, scale.still)
        fault = _is_stale(finding) if key in stale else _fault(finding, move, agreed=centre is not None)
        findings[key] = replace(finding, result=Result.FAILED, reason=fault) if fault else _passed(finding, scale, move)
    return findings


@dataclass(frozen=True, slots=True)
class Scale:
    """The distances that count as far in one update. `update` is the median move of replicas; None where unknown."""

    noise: float
    update: float | None

    @classmethod
    def of(cls, noise: float, moved: Collection[float]) -> "Scale":
        return cls(max(noise, _ROUNDING), statistics.median_high(moved) if moved else None)

    @property
    def still(self) -> float:
        """Moves up to this are noise."""
        return _TOLD_APART * self.noise

    @property
    def is_told_apart(self) -> bool:
        """True where the previous version is distinguishable from the new version."""
        return self.update is not None and self.update > self.still

    @property
    def tolerance(self) -> float:
        """The largest distance from peers that passes: at most half way to the previous version, whatever the noise."""
        of_noise = _NOISES * self.noise
        return min(of_noise, self.update / 2) if self.update is not None and self.is_told_apart else of_noise


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the mean absolute difference, in nats a token; infinite for sequences of different lengths."""
    if len(one) != len(other) or not one:
        return math.inf
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def _is_stale(finding: Finding) -> str:
    return (
        f"it still holds the previous version: its canary moved by {_said(finding.to_previous)} nats a token (noise "
        f"{_said(finding.noise)}, tolerance {_said(finding.tolerance)}), while its peers moved on and are "
        f"{_said(finding.to_peers)} away"
    )


def _fault(finding: Finding, move: "_Move | None", *, agreed: bool) -> str:
    """Return the reason why a replica that moved holds other weights than it should; empty where it does not."""
    if move is not None and move.apart > move.tolerance:
        return (
            f"its canary did not move as the trainer's log-probs did: {move.apart:.3g} nats a token apart, tolerance "
            f"{move.tolerance:.3g}"
        )
    if finding.is_far and (agreed or move is None):
        centre = "its peers'" if agreed else "the nearest other, and no two of most replicas agree"
        return (
            f"its canary is {_said(finding.to_peers)} nats a token from {centre}, tolerance "
            f"{_said(finding.tolerance)}, noise {_said(finding.noise)}; "
            f"from the previous version it is {_said(finding.to_previous)}"
        )
    return ""


def _passed(finding: Finding, scale: Scale, move: "_Move | None") -> Finding:
    if scale.update is not None and not scale.is_told_apart:
        return replace(
            finding,
            result=Result.UNCHANGED,
            reason=f"the update moved log-probs by no more than noise, {scale.noise:.3g}",
        )
    if finding.to_peers is None and move is None:
        return replace(
            finding, result=Result.NO_PEER, reason="there is no other replica of its kind to compare it with"
        )
    return finding


@dataclass(frozen=True, slots=True)
class _Move:
    """The distance between a replica's move and the trainer's.

    Moves are compared, not log-probs: a constant difference between trainer and engine cancels out.
    """

    apart: float
    tolerance: float

    @classmethod
    def of(
        cls,
        now: Reading,
        before: Reading | None,
        trainers: Logprobs | None,
        trainers_before: Reading | None,
        still: float,
    ) -> "_Move | None":
        """Return None where the trainer's log-probs are missing, moved no more than noise, or moved from another
        version: a replica has no reading of versions that it did not take, or answered too late for."""
        if before is None or trainers is None or trainers_before is None or before.version != trainers_before.version:
            return None
        size = distance(trainers, trainers_before.logprobs)
        if size <= still:
            return None
        wanted = [a - b for a, b in zip(trainers, trainers_before.logprobs, strict=True)]
        return cls(distance([a - b for a, b in zip(now.logprobs, before.logprobs, strict=True)], wanted), size / 2)


def _centre(readings: Sequence[Reading], tolerance: float) -> Reading | None:
    """Return the reading that has more than half of all within `tolerance`; None where there is none."""
    agreeing = [sum(one.apart(other) <= tolerance for other in readings) for one in readings]
    if not readings or 2 * max(agreeing) <= len(readings):
        return None
    return readings[agreeing.index(max(agreeing))]


def _to_peers(own: Reading, centre: Reading | None, others: Sequence[Reading]) -> float | None:
    """Return the distance to the centre; to the nearest peer where there is no centre, or the replica is the centre."""
    if not others:
        return None
    if centre is not None and centre is not own:
        return own.apart(centre)
    return min(own.apart(other) for other in others)


def _said(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
