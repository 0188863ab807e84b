"""The canary: one fixed sequence of tokens that replicas score after an update, which shows the weights they hold.

This file asks and remembers; `verdicts.py` judges. An engine only reports a label or a checksum; it computes log-probs
with its weights.
"""

import asyncio
import math
import random
import statistics
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import structlog

from engines.config import EngineConfig
from engines.engine import Json
from engines.errors import (
    DeadlineExceeded,
    EngineError,
    EngineOverwritten,
    EngineRefused,
    EngineUnreachable,
    InvalidRequest,
)
from engines.types import ReplicaInfo
from gateway.config.schema import CanaryConfig
from gateway.fleet.replica import Replica
from gateway.weights.verdicts import (
    LARGEST_LOGPROB,
    Finding,
    Reading,
    Result,
    Scale,
    distance,
    judge,
    to_other_kinds,
)

log = structlog.get_logger()

PATH = "/v1/completions"

_SEED = 20260
_FILLERS = 3
# Kernels and reductions are chosen by the size of a batch, and rollouts make it large: batches of these sizes show the
# log-probs that they cause, 0.008 to 0.04 nats apart (experts, LoRA, TP 2 on H200). No noise beyond the bound is
# believed, since broken weights may have any. The kernels stay, so the noise that let weights pass is remembered for
# replicas that return, whichever batch showed it. An update measures it anew: remembered alone it would never shrink.
_LARGE_BATCHES = (8, 32)
_MOST_NOISE = 0.05
# Every vocabulary has these ids; used where the checkpoint cannot be read.
_SMALL_VOCABULARY = 96
# Python's words for a NaN that JSON cannot hold: vLLM answers 400 with them where it would report one.
_NOT_FINITE = "Out of range float values"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
# Engines that differ in any of these keys compute different log-probs, so they are not compared.
_NUMERICS = (
    "dtype", "quantization", "kv_cache_dtype", "tensor_parallel_size", "pipeline_parallel_size", "enforce_eager",
    "extra",
)  # fmt: skip

_Kind = tuple[object, ...]


class Canary:
    """Asks replicas for the canary's log-probs, and keeps the last accepted answer of each for the next comparison."""

    def __init__(self, config: CanaryConfig, groups: Mapping[str, EngineConfig]) -> None:
        self._config = config
        self._groups = groups
        self._accepted: WeakKeyDictionary[Replica, Reading] = WeakKeyDictionary()
        self._noises: dict[_Kind, float] = {}
        self._trainers: Reading | None = None
        self._checked: tuple[dict[Replica, Reading], Reading | None] = {}, None
        self._token_ids: list[int] | None = None

    @property
    def is_enabled(self) -> bool:
        return self._config.enabled

    def token_ids(self, replicas: Sequence[Replica]) -> list[int]:
        """Return the sequence that all replicas score: chosen once, to fit the replicas of the first call."""
        if self._token_ids is None:
            self._token_ids = canary_token_ids([replica.info for replica in replicas], self._config.tokens)
        return self._token_ids

    def check_length(self, logprobs: Sequence[float] | None, replicas: Sequence[Replica]) -> None:
        """Raise `InvalidRequest` for a trainer's log-probs of another length than the replicas' sequence."""
        wanted = len(self.token_ids(replicas)) - 1
        if logprobs is not None and len(logprobs) != wanted:
            raise InvalidRequest(
                f"canary_logprobs has {len(logprobs)} numbers, the canary needs {wanted}: a number for each token of "
                "GET /v1/weight_canary but the first",
                param="canary_logprobs",
            )

    async def remember(self, replicas: Sequence[Replica]) -> None:
        """Read the log-probs before an update, for comparison after it."""
        unknown = [r for r in replicas if r.weight_version is not None and self._known(r) is None]
        findings, readings = await self._read_all(unknown, self.token_ids(replicas))
        self._accepted.update(readings)
        for replica, finding in findings.items():
            log.warning("no canary before the update", replica=replica.replica_id, reason=finding.reason)
        for peers in self._peers(list(unknown)):
            self._warn_of_strangers(peers)

    async def check(
        self, replicas: Sequence[Replica], version: int, *, trainers: Sequence[float] | None = None, busy: bool = False
    ) -> dict[Replica, Finding]:
        """Judge each replica's log-probs at `version`; call `accept` when the update is committed.

        `trainers` are the trainer's own log-probs of `token_ids`, without the first token. With `busy`, rollouts run at
        the same time, and a replica that answers late is unverified instead of failed.
        """
        findings, readings = await self._read_all(replicas, self.token_ids(replicas), version)
        if busy:
            findings = {replica: finding.excused_if_late() for replica, finding in findings.items()}
        given = Reading(version, tuple(trainers), 0.0) if trainers is not None else None
        kinds = self._peers(list(readings))
        for peers in kinds:
            others = self._accepted_at(version, peers[0], without=peers)
            most = _most_noise(others)
            readings |= {replica: _capped(readings[replica], most) for replica in peers}
            judged = partial(
                judge,
                previous={one: _capped(self._accepted[one], most) for one in peers if one in self._accepted},
                elsewhere=others,
                trainers=given.logprobs if given else None,
                trainers_before=self._trainers,
                busy=busy,
            )
            findings |= await self._judged(peers, readings, judged)
        for replica, apart in to_other_kinds(readings, kinds).items():
            findings[replica] = replace(findings[replica], to_other_kinds=apart)
        self._checked = (
            {replica: reading for replica, reading in readings.items() if findings[replica].may_serve},
            given,
        )
        return findings

    def accept(self) -> None:
        """Keep the log-probs of the last check: the update is committed."""
        self.accept_part()
        self._trainers = self._checked[1]
        self._checked = {}, None

    def accept_part(self) -> None:
        """Keep the log-probs of the last batch of a rolling update, for comparison with the next batch."""
        self._accepted.update(self._checked[0])

    async def admit(self, replicas: Sequence[Replica], version: int) -> dict[Replica, Finding]:
        """Judge replicas that took `version` outside an update, with each other and with accepted readings of it."""
        findings, readings = await self._read_all(replicas, self.token_ids(replicas), version, compares=True)
        for peers in self._peers(list(readings)):
            before = {replica: self._accepted[replica] for replica in peers if replica in self._accepted}
            known = self._accepted_at(version, peers[0])
            others = self._accepted_at(version, peers[0], without=peers)
            # A replica without others is held to what it said itself, if the gateway has not restarted since.
            most = _most_noise(others or known or [readings[replica] for replica in peers])
            readings |= {replica: _capped(readings[replica], most) for replica in peers}
            previous = {one: _capped(reading, most) for one, reading in before.items() if reading.version != version}
            judged = partial(judge, previous=previous, elsewhere=known)
            findings |= await self._judged(peers, readings, judged, remembers=True)
            # A reading of the same version stays: else readings that each pass beside the last might drift.
            kept = before.keys() - previous.keys()
            self._accepted.update({one: readings[one] for one in peers if findings[one].may_serve and one not in kept})
        return findings

    def forget(self, replica: Replica) -> None:
        """Compare nobody with this replica, which does not serve though it may."""
        self._accepted.pop(replica, None)

    async def _judged(
        self,
        peers: Sequence[Replica],
        readings: Mapping[Replica, Reading],
        judged: Callable[[Mapping[Replica, Reading]], dict[Replica, Finding]],
        *,
        remembers: bool = False,
    ) -> dict[Replica, Finding]:
        """Judge peers. Those that seem apart are judged again: where it `remembers`, with the noise that explained
        others, and with the noise of large batches, measured now, if that does not explain them. The largest of all
        counts, since a replica under load does not show it. Accepted readings are kept without it, as it may be a
        refused replica's."""
        kind = self._kind(peers[0])

        def judged_with(noise: float) -> dict[Replica, Finding]:
            return judged({one: replace(readings[one], noise=max(readings[one].noise, noise)) for one in peers})

        remembered = self._noises.get(kind, 0.0)
        findings = judged_with(0.0)
        if _seem_apart(findings) and remembers and remembered:
            findings = judged_with(remembered)
        if _seem_apart(findings):
            noises = await asyncio.gather(*(self._noise_of_large_batches(one, readings[one]) for one in peers))
            noise = min(max(noises), _MOST_NOISE)
            findings = judged_with(noise)
            if all(finding.may_serve for finding in findings.values()):
                self._noises[kind] = noise
        elif remembers and any(_passed_beyond(remembered, finding) for finding in findings.values()):
            noise = statistics.median_high(readings[replica].noise for replica in peers)
            self._noises[kind] = max(remembered, min(noise, _MOST_NOISE))
        return findings

    async def _noise_of_large_batches(self, replica: Replica, reading: Reading) -> float:
        """Return the distance of a reading to those in large batches, as far as the replica answers."""
        noise, token_ids = 0.0, self.token_ids([replica])
        with suppress(EngineError, InvalidRequest, DeadlineExceeded, TimeoutError, _NoLogprobs):
            async with asyncio.timeout(self._config.timeout_s):
                for size in _LARGE_BATCHES:
                    scored = await self._score_beside(replica, token_ids, [token_ids] * (size - 1))
                    noise = max(noise, distance(reading.logprobs, scored))
        return noise

    def _known(self, replica: Replica) -> Reading | None:
        """Return the accepted reading of the weights that a replica holds, if there is one."""
        reading = self._accepted.get(replica)
        return reading if reading is not None and reading.version == replica.weight_version else None

    def _accepted_at(self, version: int, one: Replica, *, without: Collection[Replica] = ()) -> list[Reading]:
        """Return accepted readings at this version, of replicas of one kind."""
        return [
            reading
            for replica, reading in self._accepted.items()
            if replica not in without and reading.version == version and self._kind(replica) == self._kind(one)
        ]

    def _peers(self, replicas: Sequence[Replica]) -> list[list[Replica]]:
        kinds: dict[_Kind, list[Replica]] = {}
        for replica in replicas:
            kinds.setdefault(self._kind(replica), []).append(replica)
        return list(kinds.values())

    def _kind(self, replica: Replica) -> _Kind:
        """Return a key shared by replicas of the same engine, release and shape: their log-probs must be equal."""
        info, group = replica.info, self._groups.get(replica.info.group)
        numerics = [repr(getattr(group, name)) for name in _NUMERICS] if group else [info.group]
        return (info.kind, info.engine_version, info.world_size, *numerics)

    def _warn_of_strangers(self, peers: Sequence[Replica]) -> None:
        """Log replicas of one version whose log-probs differ: most likely their checkpoints differ."""
        known = [(replica, reading) for replica in peers if (reading := self._known(replica)) is not None]
        for replica, reading in known[1:]:
            first, other = known[0]
            apart, noise = distance(reading.logprobs, other.logprobs), max(reading.noise, other.noise)
            if reading.version == other.version and apart > Scale(noise, None).tolerance:
                log.warning(
                    "replicas of one version differ", replicas=[first.replica_id, replica.replica_id],
                    version=reading.version, distance=apart, noise=noise,
                )  # fmt: skip

    async def _read_all(
        self, replicas: Sequence[Replica], token_ids: list[int], version: int | None = None, *, compares: bool = False
    ) -> tuple[dict[Replica, Finding], dict[Replica, Reading]]:
        """Return the findings of replicas that gave no reading, and the readings of the others.

        One that `compares` equal to an accepted reading, but for noise that is remembered, needs no measure of noise.
        """
        known = {one: self._accepted_at(version, one) if compares and version is not None else () for one in replicas}
        answers = await asyncio.gather(*(self._ask(one, token_ids, version, known[one]) for one in replicas))
        both = list(zip(replicas, answers, strict=True))
        findings = {replica: answer for replica, answer in both if isinstance(answer, Finding)}
        return findings, {replica: answer for replica, answer in both if isinstance(answer, Reading)}

    async def _ask(
        self, replica: Replica, token_ids: list[int], version: int | None, known: Sequence[Reading]
    ) -> Reading | Finding:
        """Return a replica's reading, or a finding if there is none. `known` are accepted readings at this version."""
        if not replica.info.speaks_vllm:
            return Finding(Result.UNVERIFIED, f"the server at {replica.info.url} gives no log-probs of a prompt")
        held = replica.weight_version if version is None else version
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._config.timeout_s):
                alone = await self._score(replica, token_ids)
                # A reading equal to a known reading needs no measure of noise, which saves a returning replica time.
                by_batch = Scale(self._noises.get(self._kind(replica), 0.0), None).tolerance
                same = next((reading for reading in known if distance(reading.logprobs, alone) <= by_batch), None)
                noise = same.noise if same else await self._noise(replica, token_ids, alone)
        except (EngineRefused, InvalidRequest) as error:
            result = Result.FAILED if _NOT_FINITE in str(error) else Result.UNVERIFIED
            return Finding(result, f"the canary was refused: {error}")
        except (TimeoutError, DeadlineExceeded):
            limit = f"weights.canary.timeout_s = {self._config.timeout_s:g}"
            return Finding(Result.FAILED, f"no answer to the canary within {limit}", is_late=True)
        except (EngineUnreachable, EngineOverwritten) as error:
            return Finding(Result.LOST, str(error))
        except (EngineError, _NoLogprobs) as error:
            return Finding(Result.FAILED, f"no answer to the canary: {error}")
        if not math.isfinite(noise):  # as it is where the log-probs alone are no numbers
            return Finding(Result.FAILED, "the canary's log-probs are not finite: the weights hold infinities or NaN")
        return Reading(held or 0, alone, noise, time.monotonic() - began)

    async def _noise(self, replica: Replica, token_ids: list[int], alone: tuple[float, ...]) -> float:
        """Return the distance of the sequence's log-probs alone to those in a small batch."""
        fillers = [token_ids[: len(token_ids) // (index + 2)] or token_ids for index in range(_FILLERS)]
        return distance(alone, await self._score_beside(replica, token_ids, fillers))

    async def _score_beside(
        self, replica: Replica, token_ids: list[int], fillers: Sequence[list[int]]
    ) -> tuple[float, ...]:
        """Score the sequence in a batch with other sequences."""
        *_, scored = await asyncio.gather(*(self._score(replica, ids) for ids in (*fillers, token_ids)))
        return scored

    async def _score(self, replica: Replica, token_ids: list[int]) -> tuple[float, ...]:
        body: Json = {
            "model": replica.info.model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "cache_salt": f"canary-{uuid.uuid4().hex}",  # KV of an earlier canary would be scored instead of weights
        }
        answer = await replica.unless_lost(replica.engine.generate(PATH, body, self._config.timeout_s))
        try:
            return _logprobs(answer, token_ids)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise _NoLogprobs(f"its answer {answer!r:.200} cannot be read: {type(error).__name__}: {error}") from error


def _seem_apart(findings: Mapping[Replica, Finding]) -> bool:
    return any(finding.result is Result.FAILED and finding.is_far for finding in findings.values())


def _passed_beyond(noise: float, finding: Finding) -> bool:
    """True where a replica is right, though farther from its peers than this noise explains."""
    apart = finding.to_peers
    return finding.result is Result.VERIFIED and apart is not None and apart > Scale(noise, None).tolerance


def _most_noise(readings: Sequence[Reading]) -> float:
    """Return the most noise that is believed of a replica beside these readings; any where there are none."""
    return max(_MOST_NOISE, statistics.median_low(reading.noise for reading in readings)) if readings else math.inf


def _capped(reading: Reading, most: float) -> Reading:
    return replace(reading, noise=min(reading.noise, most))


class _NoLogprobs(Exception):
    """The answer has no log-prob for a token of the prompt, or another form than a completion."""


def canary_token_ids(infos: Sequence[ReplicaInfo], tokens: int) -> list[int]:
    """Return seeded ids from the middle of the smallest vocabulary, where no special tokens are; at most a context."""
    vocabulary = min(map(_vocabulary, infos), default=_SMALL_VOCABULARY)
    room = min((info.max_model_len - 1 for info in infos if info.max_model_len is not None), default=tokens)
    draw = random.Random(_SEED)
    return [draw.randrange(vocabulary // 8, max(vocabulary // 2, 1)) for _ in range(min(tokens, room))]


def _vocabulary(info: ReplicaInfo) -> int:
    rows = [tensor.shape[0] for tensor in info.tensors or () if tensor.name.endswith(_EMBEDDINGS)]
    return min(rows, default=_SMALL_VOCABULARY)


def _logprobs(answer: Json, token_ids: list[int]) -> tuple[float, ...]:
    """Return log-probs of all tokens but the first, which has no context."""
    reported = answer["choices"][0].get("prompt_logprobs")
    if not isinstance(reported, list) or len(reported) != len(token_ids):
        raise _NoLogprobs(f"{len(token_ids)} tokens were asked for, prompt_logprobs is {str(reported)[:80]}")
    values = []
    for position, (token_id, scored) in enumerate(zip(token_ids, reported, strict=True)):
        value = (scored or {}).get(str(token_id), {}).get("logprob")
        if position and not _is_logprob(value):
            raise _NoLogprobs(f"the log-prob of token {position} is {value!r:.80}, which is no log-prob")
        if position:
            values.append(float(value))
    return tuple(values)


def _is_logprob(value: object) -> bool:
    """Return True for a number of float32, also for infinities and NaN, which have a finding of their own.

    An external vLLM with `logprobs_mode: raw_logits` reports logits, which may be positive.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= LARGEST_LOGPROB or value in (math.inf, -math.inf) or value != value
