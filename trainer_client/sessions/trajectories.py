"""The rows of a session: each path of its calls, with a mask by which each sampled token is trained once."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer_client.sessions.records import Call, Session


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One path from a root to a call that nothing trainable follows. Arrays but `prompt_ids` are as long as
    `completion_ids`."""

    session_id: str
    group: str
    """Sessions of one task have it in common: `group` of their metadata, as `SessionGroups` writes it; else the id."""
    calls: tuple[int, ...]
    agent: str | None
    """The harness's name of the agent of its last call; None for the main one."""
    prompt_ids: NDArray[np.int32]
    """The root's prompt."""
    completion_ids: NDArray[np.int32]
    """Sampled tokens, and between them what tools and users said."""
    mask: NDArray[np.int8]
    """1 for each token that is trained here."""
    logprobs: NDArray[np.float32]
    """As sampled; 0 where `mask` is 0."""
    versions: NDArray[np.int32]
    """Of the weights that sampled the token; -1 for tokens that no model sampled."""
    rewards: NDArray[np.float32]
    """Rewards of single calls, on the last token of each."""
    reward: float | None
    """The session's."""
    finish_reason: str | None
    """Of its last call; "abort" where a call after it was cut off or failed."""

    @property
    def trainable(self) -> int:
        """The number of tokens that are trained here."""
        return int(self.mask.sum())

    @property
    def version_range(self) -> tuple[int, int]:
        """The oldest and the newest weights of its trained tokens."""
        trained = self.versions[self.mask == 1]
        return int(trained.min()), int(trained.max())


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of a session: `sampled` is `trainable` and all of `masked`, by reason."""

    sampled: int
    trainable: int
    masked: Mapping[str, int]


def trajectories_of(session: Session) -> list[Trajectory]:
    """Return the rows of a session, the path with the most trainable tokens first.

    A call that several paths share is trained in the first of them; its tokens have mask 0 in the others. A path ends
    with its last trainable call.
    """
    reasons = _reasons(session)
    trainable = {call.index for call in session.calls if reasons[call.index] is None and len(call.token_ids)}
    followed = {call.index for leaf in trainable for call in session.path(leaf)[:-1]}
    paths = [session.path(index) for index in sorted(trainable - followed)]
    paths.sort(key=lambda path: -sum(len(call.token_ids) for call in path if call.index in trainable))
    rows = []
    for path in paths:
        rows.append(_row(session, path, trainable))
        trainable -= {call.index for call in path}
    return [row for row in rows if row.trainable]


def counts_of(session: Session) -> Counts:
    """Return the counts of what `trajectories_of` makes trainable."""
    masked: Counter[str] = Counter()
    for call, reason in zip(session.calls, _reasons(session), strict=True):
        num_masked = len(call.token_ids) if reason else int(np.isnan(_logprobs(call)).sum())
        masked[reason or "no_logprobs"] += num_masked
    sampled = sum(len(call.token_ids) for call in session.calls)
    return Counts(sampled, sampled - masked.total(), dict(+masked))


def _reasons(session: Session) -> list[str | None]:
    """Return why each call is not trained; None where it is.

    An answer that a later prompt begins with has reached its client, also where the connection broke. Of calls that are
    retries of each other those that were gone on with are kept, else the latest that can be trained.
    """
    parents, tries = {call.parent for call in session.calls}, dict[int, list[int]]()
    reasons, firsts = list[str | None](), list[int]()
    for call in session.calls:
        has_arrived = call.mask == "client_left" and call.index in parents
        reasons.append(None if has_arrived else call.mask)
        firsts.append(call.index if call.retry_of is None else firsts[call.retry_of])
        tries.setdefault(firsts[-1], []).append(call.index)
    for same in tries.values():
        good = [index for index in same if reasons[index] is None]
        kept = [index for index in same if index in parents] or good[-1:]
        for index in set(good) - set(kept):
            reasons[index] = "retried"
    return reasons


def _row(session: Session, path: list[Call], trainable: set[int]) -> Trajectory:
    completion_ids = np.concatenate([ids for call in path for ids in (call.prompt_token_ids, call.token_ids)][1:])
    mask, logprobs = np.zeros(len(completion_ids), np.int8), np.zeros(len(completion_ids), np.float32)
    versions, rewards = np.full(len(completion_ids), -1, np.int32), np.zeros(len(completion_ids), np.float32)
    end = -len(path[0].prompt_token_ids)
    for call in path:
        start = end + len(call.prompt_token_ids)
        end = start + len(call.token_ids)
        _stamp(call, versions[start:end])
        if call.index in trainable:
            mask[start:end] = ~np.isnan(told := _logprobs(call))
            logprobs[start:end] = np.nan_to_num(told)
            if call.reward is not None:
                rewards[end - 1] = call.reward
    is_broken_off = any(call.parent == path[-1].index and call.mask for call in session.calls)
    return Trajectory(
        session_id=session.id,
        group=str((session.metadata or {}).get("group", session.id)),
        calls=tuple(call.index for call in path),
        agent=path[-1].agent,
        prompt_ids=path[0].prompt_token_ids,
        completion_ids=completion_ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        rewards=rewards,
        reward=session.reward,
        finish_reason="abort" if is_broken_off else path[-1].finish_reason,
    )


def _logprobs(call: Call) -> NDArray[np.float32]:
    return np.full(len(call.token_ids), np.nan, np.float32) if call.logprobs is None else call.logprobs


def _stamp(call: Call, versions: NDArray[np.int32]) -> None:
    """Write the version of each token; the oldest of those without limits where no span has it."""
    versions[:] = min((span.version for span in call.spans or () if None in (span.start, span.end)), default=-1)
    for span in call.spans or ():
        if span.start is not None and span.end is not None:
            versions[span.start : span.end] = span.version
