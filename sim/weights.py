"""The order of weight calls on a simulated engine, with vLLM's refusals."""

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from engines.errors import WeightUpdateConflict
from sim.worker import SimWorker

Json = dict[str, Any]
Info = TypeVar("Info", bound=BaseModel)


class InitInfo(BaseModel):
    """Arguments to open a transfer group: the keys of vLLM's backend."""

    model_config = ConfigDict(extra="forbid")

    rank_offset: int
    world_size: int
    master_address: str | None = None
    master_port: int | None = None
    nccl_unique_id_b64: str | None = None
    packed: bool = False
    packed_buffer_size_bytes: int | None = None
    packed_num_buffers: int | None = None


class UpdateInfo(BaseModel):
    """The tensors of one chunk of an update."""

    model_config = ConfigDict(extra="forbid")

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class WeightSession:
    """The order of weight calls, as in vLLM's workers. Announced tensors are checked; no data moves."""

    def __init__(self, tensors: dict[str, list[int]], world_size: int, worker: SimWorker) -> None:
        self._tensors = tensors
        self._worker = worker
        self._world_size = world_size
        self._group_open = False
        self._active = False

    def open_group(self, init_info: Json) -> None:
        info = _info(InitInfo, init_info)
        if not 1 <= info.rank_offset <= info.world_size - self._world_size:
            raise WeightUpdateConflict(
                f"ranks {info.rank_offset} to {info.rank_offset + self._world_size - 1} of this engine do not fit "
                f"in a group of {info.world_size} beside the trainer"
            )
        self._group_open = True

    def close_group(self) -> None:
        if self._active:
            raise WeightUpdateConflict("Cannot release a trainer connection during a weight update")
        self._group_open = False

    def start(self) -> None:
        if self._active:
            raise WeightUpdateConflict(
                "start_weight_update called while a weight update is already active. Call finish_weight_update first."
            )
        self._active = True

    def update(self, update_info: Json | list[Json]) -> None:
        if not self._active:
            raise WeightUpdateConflict("start_weight_update must be called before update_weights.")
        try:
            self.receive(update_info)
        except WeightUpdateConflict:
            self._active = False  # vLLM abandons the update on any error
            raise

    def receive(self, update_info: Json | list[Json]) -> None:
        """Receive announced tensors, into the weights or beside them."""
        for info in update_info if isinstance(update_info, list) else [update_info]:
            parsed = _info(UpdateInfo, info)
            self._receive(parsed)
            self._worker.see(parsed.names, parsed.shapes)

    def load_staged(self) -> None:
        """Have the weights take what was received beside them."""
        if not self._active:
            raise WeightUpdateConflict("start_weight_update must be called before load_staged.")

    def finish(self) -> None:
        if not self._active:
            raise WeightUpdateConflict("finish_weight_update called without a matching start_weight_update.")
        self._active = False

    def break_off(self) -> None:
        """Abort the open update, if any."""
        self._active = False

    def _receive(self, info: UpdateInfo) -> None:
        if not self._group_open:
            raise WeightUpdateConflict("Weight transfer not initialized. Call init_transfer_engine() first.")
        if not len(info.names) == len(info.dtype_names) == len(info.shapes):
            raise WeightUpdateConflict("`names`, `dtype_names` and `shapes` should be of the same size")
        for name, shape in zip(info.names, info.shapes, strict=True):
            if name not in self._tensors:
                raise WeightUpdateConflict(f"There is no module or parameter named {name!r}")
            if shape != self._tensors[name]:
                raise WeightUpdateConflict(
                    f"tensor {name!r} has shape {shape}, but the model's is {self._tensors[name]}"
                )


def _info(kind: type[Info], info: Json) -> Info:
    try:
        return kind.model_validate(info)
    except ValidationError as error:
        # vLLM finds this in its workers, too late for a 400.
        raise WeightUpdateConflict(f"Invalid {kind.__name__}: {error}") from error
