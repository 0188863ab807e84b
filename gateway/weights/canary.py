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
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
    EngineFailed,
    EngineOverwritten,
    EngineRefused,
    EngineUnreachable,
    InvalidRequest,
)
from engines.types import ReplicaInfo, ReplicaState
from gateway.config.schema import CanaryConfig
from gateway.fleet.replica import Replica
from gateway.weights.verdicts import ROUNDING, Finding, Logprobs, Reading, Result, distance, judge

log = structlog.get_logger()

PATH = "/v1/completions"

_SEED = 20260
# Engines choose kernels by the size of a batch, and rollouts make it large. Batches of these sizes show the noise that
# the kernels cause: 0.008 to 0.04 nats with experts, LoRA and TP 2 on H200, 0.16 with fp8 on H100.
_BATCHES = (1, 4, 8, 32)
# Every vocabulary has these ids; used where the checkpoint cannot be read.
_SMALL_VOCABULARY = 96
# Python's words for a NaN that JSON cannot hold: vLLM answers 400 with them where it would report one.
_NOT_FINITE = "Out of range float values"
_NAN = "a log-prob of the canary is not finite: the weights hold infinities or NaN"
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
        unknown = [r for r in replicas if r.weight_version is not None and not self._has_read(r, r.weight_version)]
        findings, readings = await self._read_all(unknown)
        self._accepted.update(readings)
        for replica, finding in findings.items():
            log.warning("no canary before the update", replica=replica.replica_id, reason=finding.reason)

    async def check(
        self, replicas: Sequence[Replica], version: int, *, trainers: Sequence[float] | None = None, busy: bool = False
    ) -> dict[Replica, Finding]:
        """Judge each replica's log-probs at `version`; call `accept` when the update is committed.

        `trainers` are the trainer's own log-probs of `token_ids`, without the first token. With `busy`, rollouts run at
        the same time, and a replica that answers late is unverified instead of failed.
        """
        findings, readings = await self._read_all(replicas, version)
        for replica, finding in findings.items():
            if busy and finding.is_late:
                findings[replica] = replace(finding, result=Result.UNVERIFIED)
        given = Reading(version, tuple(trainers)) if trainers is not None else None
        kinds: defaultdict[_Kind, list[Replica]] = defaultdict(list)
        for replica in readings:
            kinds[self._kind(replica)].append(replica)
        for peers in kinds.values():
            judged = partial(
                judge,
                {one: readings[one] for one in peers},
                previous={one: self._accepted[one] for one in peers if one in self._accepted},
                trainers=given.logprobs if given else None,
                trainers_before=self._trainers,
            )
            findings |= await self._judged(judged, version, witnesses=peers)
        served = {replica: reading for replica, reading in readings.items() if findings[replica].may_serve}
        self._checked = served, given
        return findings

    def accept(self) -> None:
        """Keep the log-probs of the last check: the update is committed."""
        self._accepted.update(self._checked[0])
        self._trainers = self._checked[1]
        self._checked = {}, None

    async def admit(self, replica: Replica, version: int) -> Finding:
        """Judge a replica that took `version` outside an update, by others' accepted readings of it.

        Alone it is not held to its own reading, or a dead one's: load, and so kernels, may have been others then.
        """
        findings, readings = await self._read_all([replica], version)
        if findings:
            return findings[replica]
        before, has_read_it = self._accepted.get(replica), self._has_read(replica, version)
        kind, lost = self._kind(replica), ReplicaState.LOST
        others = {
            one: its
            for one, its in self._accepted.items()
            if one is not replica and one.state is not lost and its.version == version and self._kind(one) == kind
        }
        previous = {} if before is None or has_read_it else {replica: before}
        judged = partial(judge, readings, previous=previous, elsewhere=list(others.values()))
        witnesses = [one for one in others if one.weight_version == version]  # others are on their way too
        finding = (await self._judged(judged, version, witnesses=witnesses))[replica]
        if finding.may_serve and not (has_read_it and others):  # else readings that each pass beside the last may drift
            self._accepted[replica] = readings[replica]
        return finding

    async def _judged(
        self, judged: Callable[..., dict[Replica, Finding]], version: int, *, witnesses: Sequence[Replica]
    ) -> dict[Replica, Finding]:
        """Judge replicas of one kind: as if there were no noise, which finds the smallest updates, then with the noise
        that the kind is known for, then with what the witnesses show now, or else the judged themselves. That of
        witnesses is kept, with weights of a trainer that pass: a checkpoint's may be random (`load_format: dummy`)."""
        findings = judged(noise=0.0)
        noise = self._noises.get(kind := self._kind(next(iter(findings))), 0.0)
        for asked in ([], witnesses, [replica for replica in findings if replica not in witnesses]):
            if all(finding.may_serve for finding in findings.values()):
                break
            noise = max(noise, await self._noise(asked))
            findings = judged(noise=noise)
            if version and asked is witnesses and all(finding.may_serve for finding in findings.values()):
                self._noises[kind] = noise
        return findings

    async def _noise(self, witnesses: Sequence[Replica]) -> float:
        """Return the largest distance between a replica's log-probs in batches of several sizes, 0 where none shows any
        in time: the median of those that do, since a damaged one may show any, and a loaded one none."""
        noises = [noise for noise in await asyncio.gather(*map(self._noise_of, witnesses)) if noise > ROUNDING]
        return statistics.median_high(noises) if noises else 0.0

    async def _noise_of(self, replica: Replica) -> float:
        token_ids = self.token_ids([replica])
        scored: list[Logprobs] = []
        with suppress(EngineError, InvalidRequest, DeadlineExceeded, TimeoutError):
            async with asyncio.timeout(self._config.timeout_s):
                for size in _BATCHES:
                    others = asyncio.gather(*(self._generate(replica, token_ids) for _ in range(size - 1)))
                    _, logprobs = await asyncio.gather(others, self._score(replica, token_ids))
                    scored.append(logprobs)
        return max((distance(scored[0], one) for one in scored), default=0.0)

    def _has_read(self, replica: Replica, version: int) -> bool:
        """Return True where the accepted reading of a replica is of this version."""
        return (reading := self._accepted.get(replica)) is not None and reading.version == version

    def _kind(self, replica: Replica) -> _Kind:
        """Return a key shared by replicas of the same engine, release and shape: their log-probs must be equal."""
        info, group = replica.info, self._groups.get(replica.info.group)
        numerics = [repr(getattr(group, name)) for name in _NUMERICS] if group else [info.group]
        return (info.kind, info.engine_version, info.world_size, *numerics)

    async def _read_all(
        self, replicas: Sequence[Replica], version: int | None = None
    ) -> tuple[dict[Replica, Finding], dict[Replica, Reading]]:
        """Return the findings of replicas that gave no reading, and the readings of the others."""
        self.token_ids(replicas)
        answers = await asyncio.gather(*(self._ask(replica, version) for replica in replicas))
        both = list(zip(replicas, answers, strict=True))
        findings = {replica: answer for replica, answer in both if isinstance(answer, Finding)}
        return findings, {replica: answer for replica, answer in both if isinstance(answer, Reading)}

    async def _ask(self, replica: Replica, version: int | None) -> Reading | Finding:
        """Return a replica's reading, or a finding if there is none. It is at the replica's version by default."""
        held = replica.weight_version if version is None else version
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._config.timeout_s):
                logprobs = await self._score(replica, self.token_ids([replica]))
        except (EngineRefused, InvalidRequest) as error:
            if _NOT_FINITE in str(error):
                return Finding(Result.FAILED, _NAN)
            return Finding(Result.UNVERIFIED, f"the canary was refused: {error}")
        except (TimeoutError, DeadlineExceeded):
            reason = f"no answer to the canary within weights.canary.timeout_s = {self._config.timeout_s:g}"
            return Finding(Result.FAILED, reason, is_late=True)
        except (EngineUnreachable, EngineOverwritten) as error:
            return Finding(Result.LOST, str(error))
        except EngineError as error:
            return Finding(Result.FAILED, f"no answer to the canary: {error}")
        return Reading(held or 0, logprobs, seconds=time.monotonic() - began)

    async def _score(self, replica: Replica, token_ids: list[int]) -> Logprobs:
        """Return log-probs of all tokens but the first, which has no context. An external vLLM with `logprobs_mode:
        raw_logits` gives logits, which may be positive."""
        answer = await self._generate(replica, token_ids, prompt_logprobs=0)
        try:
            scored = zip(token_ids[1:], answer["choices"][0]["prompt_logprobs"][1:], strict=True)
            values = tuple(float(found[str(token_id)]["logprob"]) for token_id, found in scored)
        except (LookupError, TypeError, ValueError) as error:  # such as of a proxy that knows no `prompt_logprobs`
            raise EngineFailed(f"its answer {answer!r:.200} lacks log-probs of the prompt's tokens") from error
        if not all(map(math.isfinite, values)):
            raise EngineFailed(_NAN)
        return values

    async def _generate(self, replica: Replica, token_ids: list[int], **more: int) -> Json:
        body: Json = {
            "model": replica.info.model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "cache_salt": f"canary-{uuid.uuid4().hex}",  # KV of an earlier canary would be scored instead of weights
            **more,
        }
        return await replica.unless_lost(replica.engine.generate(PATH, body, self._config.timeout_s))


def canary_token_ids(infos: Sequence[ReplicaInfo], tokens: int) -> list[int]:
    """Return seeded ids from the middle of the smallest vocabulary, where no special tokens are; at most a context."""
    vocabulary = min(map(_vocabulary, infos), default=_SMALL_VOCABULARY)
    room = min((info.max_model_len - 1 for info in infos if info.max_model_len is not None), default=tokens)
    draw = random.Random(_SEED)
    return [draw.randrange(vocabulary // 8, max(vocabulary // 2, 1)) for _ in range(min(tokens, room))]


def _vocabulary(info: ReplicaInfo) -> int:
    rows = [tensor.shape[0] for tensor in info.tensors or () if tensor.name.endswith(_EMBEDDINGS)]
    return min(rows, default=_SMALL_VOCABULARY)
