"""The transfer group: a trainer and the engines' workers, or a trainer and the relay."""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from math import prod
from urllib.parse import urlsplit

from engines.engine import Json
from engines.errors import EngineRefused, InvalidRequest, WeightUpdateConflict
from engines.types import OLDEST, Dialect, ReplicaState
from gateway.fleet.replica import Replica
from gateway.fleet.replica_calls import names
from gateway.weights.updates.record import itemsize


@dataclass(frozen=True, slots=True)
class TransferGroup:
    """The trainer (rank 0) and the workers of these replicas. Membership is fixed: a member's death breaks it."""

    members: tuple[Replica, ...]
    transport: str

    @property
    def scribe(self) -> Replica | None:
        """The member that copies received tensors into the store. Another node may not have the store's folder."""
        return next((replica for replica in self.members if replica.info.has_tee and not replica.info.is_far), None)

    @property
    def broken_by(self) -> Replica | None:
        gone = (ReplicaState.DRAINING, ReplicaState.LOST)
        return next((replica for replica in self.members if replica.state in gone), None)


async def transport_of(replica: Replica, timeout_s: float) -> str:
    """Return the name of the engine's weight transfer backend.

    A vLLM of ours is not asked: its first answer takes seconds, in which it looks at the whole machine, and an engine
    that dies meanwhile would fail the trainer's call.

    Raise `EngineError` or `DeadlineExceeded` where the engine does not answer: with a guess the trainer could form
    another group than its calls find later.
    """
    if replica.info.transport:
        return replica.info.transport
    try:
        info = await replica.engine.ask("GET", "/server_info?config_format=json", None, timeout_s)
        return str(info["vllm_config"]["weight_transfer_config"]["backend"])
    except (EngineRefused, KeyError, TypeError):
        return "unknown"  # a server without this route may still take weights


def checkpoint_bytes(members: Sequence[Replica]) -> int:
    """Return the bytes of the largest of the members' checkpoints; one that could not be read has 0."""
    checkpoints = [replica.info.tensors or () for replica in members]
    return max(sum(itemsize(one.dtype) * prod(one.shape) for one in tensors) for tensors in checkpoints)


def check_some_take_weights(members: Sequence[Replica], alive: Sequence[Replica]) -> None:
    if not members and alive:
        raise WeightUpdateConflict(
            f"no replica of the policy takes weights: {names(alive)}; vLLM from {OLDEST[Dialect.VLLM]} on takes them "
            "when it is started with --weight-transfer-config and VLLM_SERVER_DEV_MODE=1"
        )


def check_take_packed(members: Sequence[Replica], init_info: Json) -> None:
    """Raise for SGLang where it takes no trainer's group, or no broadcasts of single tensors: others would hang."""
    of_sglang = [replica for replica in members if replica.info.dialect is Dialect.SGLANG]
    is_packed = init_info.get("packed", True)
    for replica in of_sglang:
        if not (is_packed and replica.info.takes_packed):
            reload = replica.info.reload_reason
            why = f"leaves updates to SGLang: {reload}" if reload else "runs without our plugin"
            why = why if is_packed else "takes no broadcasts of single tensors (packed: false)"
            raise WeightUpdateConflict(
                f"replica {replica.replica_id} of SGLang cannot be in a transfer group, as it {why}: send packed "
                "chunks to engines that this gateway starts, let the relay receive for all (weights.relay: always; "
                "weights.relay_device where the trainer sends over NCCL), or push through the store"
            )


def check_reachable(members: Sequence[Replica], init_info: Json) -> None:
    """Raise for a loopback address with remote engines: they would look for the trainer on their own machine."""
    address = str(init_info.get("master_address"))
    away = next((replica for replica in members if not _is_loopback(urlsplit(replica.info.url).hostname or "")), None)
    if away is not None and _is_loopback(address):
        raise WeightUpdateConflict(
            f"init_info.master_address is {address!r}, where replica {away.replica_id} ({away.info.url}) cannot find "
            "the trainer: give the address of the trainer that engines reach, such as WeightSender(address=...)"
        )


def check_world_size(init_info: Json, workers: int, reason: str) -> None:
    if init_info.get("world_size") != workers + 1:
        raise WeightUpdateConflict(
            f"init_info.world_size is {init_info.get('world_size')!r}, but {reason}, so the group needs {workers + 1}: "
            "call /get_world_size again"
        )


def rank_offsets(members: Sequence[Replica], init_info: Json) -> dict[Replica, int]:
    """Return the first rank of each replica's workers, counted from the trainer's own offset."""
    workers = sum(replica.info.world_size for replica in members)
    if not members:
        raise WeightUpdateConflict("no replica is there to join a transfer group: see /health")
    check_world_size(init_info, workers, f"the fleet has {workers} workers now")
    offsets, rank = {}, init_info.get("rank_offset", 1)
    if type(rank) is not int:
        raise InvalidRequest(
            f"init_info.rank_offset = {rank!r:.80} must be the first rank of the engines' workers: the number of the "
            "trainer's processes in the group, 1 if left out",
            param="rank_offset",
        )
    for replica in members:
        offsets[replica] = rank
        rank += replica.info.world_size
    return offsets


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False  # a host name
