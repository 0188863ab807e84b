"""Judges canary readings, as pure functions over numbers; `canary.py` asks for them.

A distance is the mean absolute difference of log-probs, in nats a token. Between a replica and its peers it should be
noise, and between a replica and itself before the update more than that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from engines.engine import Json

Key = TypeVar("Key")

Logprobs = tuple[float, ...]

# Healthy replicas differ by about the noise, and measurements of noise vary, so three times the noise is tolerated. A
# move of at most four times the noise may be none: a replica that stays behind a larger one is farther from its peers
# than they tolerate.
_NOISES = 3.0
_STILL = 4.0
# Engines compute log-probs in float32, so this much noise is always assumed.
ROUNDING = 1e-5


class Result(StrEnum):
    """The outcome of a check of a replica's weights."""

    VERIFIED = "verified"
    UNCHANGED = "unchanged"  # equal to its peers, but the update moved its log-probs by no more than noise
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
    tolerance: float | None = None
    noise: float | None = None
    seconds: float | None = None
    is_late: bool = False

    @property
    def may_serve(self) -> bool:
        return self.result not in (Result.FAILED, Result.LOST)

    def report(self) -> Json:
        """Return the finding as JSON; distances are in nats a token."""
        names = ("to_peers", "to_previous", "tolerance", "noise", "seconds")
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
    noise = max(noise, ROUNDING)
    tolerance = _NOISES * noise
    centre = _centre([*elsewhere, *readings.values()], tolerance)
    findings = {}
    for key, reading in readings.items():
        before = previous.get(key)
        to_peers = _to_peers(reading, centre, [*elsewhere, *(readings[other] for other in readings if other != key)])
        to_previous = reading.apart(before) if before is not None else None
        move = _Move.of(reading, before, trainers, trainers_before, _STILL * noise)
        result, reason = _outcome(to_peers, to_previous, move, noise, agreed=centre is not None)
        findings[key] = Finding(result, reason, to_peers, to_previous, tolerance, noise, reading.seconds)
    return findings


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the mean absolute difference, in nats a token; infinite for sequences of different lengths."""
    if len(one) != len(other) or not one:
        return math.inf
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def _outcome(
    to_peers: float | None, to_previous: float | None, move: "_Move | None", noise: float, *, agreed: bool
) -> tuple[Result, str]:
    """Return the result for one replica, and its reason. `agreed` where most of its peers agree."""
    tolerance = _NOISES * noise
    if move is not None and move.apart > move.tolerance:
        return Result.FAILED, (
            f"its canary did not move as the trainer's log-probs did: {move.apart:.3g} nats a token apart, tolerance "
            f"{move.tolerance:.3g}"
        )
    if to_peers is not None and to_peers > tolerance and (agreed or move is None):
        centre = "its peers'" if agreed else "the nearest other, and no two of most replicas agree"
        before = "unknown" if to_previous is None else f"{to_previous:.3g}"
        return Result.FAILED, (
            f"its canary is {to_peers:.3g} nats a token from {centre}, tolerance {tolerance:.3g}, noise {noise:.3g}; "
            f"from the previous version it is {before}"
        )
    if to_previous is not None and to_previous <= _STILL * noise:
        return Result.UNCHANGED, f"the update moved log-probs by no more than noise, {noise:.3g}"
    if to_peers is None and move is None:
        return Result.NO_PEER, "there is no other replica of its kind to compare it with"
    return Result.VERIFIED, ""


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
