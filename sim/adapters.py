"""LoRA adapters of the simulated engine: names, and a digest of each folder in place of its weights."""

from hashlib import blake2b
from pathlib import Path
from typing import Any

from engines.checkpoint.adapter import read_adapter
from engines.errors import InvalidRequest, RolloutGatewayError, WeightUpdateConflict
from sim.dialect import Adapter


class AdapterNotFound(RolloutGatewayError):
    """vLLM's 404 for an unknown name or a missing folder."""


class SimAdapters:
    """The loaded adapters, as in vLLM's API server."""

    def __init__(self, max_loras: int, max_lora_rank: int, max_cpu_loras: int | None = None) -> None:
        self.config: dict[str, Any] = {"max_loras": max_loras, "max_cpu_loras": max_cpu_loras or max_loras}
        self.config["max_lora_rank"] = max_lora_rank
        self._adapters: dict[str, Adapter] = {}

    @property
    def listed(self) -> list[Adapter]:
        return list(self._adapters.values())

    def get(self, name: str) -> Adapter | None:
        return self._adapters.get(name)

    def load(self, name: str, path: str) -> None:
        if name in self._adapters:
            raise InvalidRequest(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
        folder = Path(path)
        if not folder.is_dir():
            raise AdapterNotFound(f"Loading lora {name} failed: No adapter found for {path}")
        try:
            found = read_adapter(folder)
        except InvalidRequest as error:  # vLLM finds this in its workers, too late for a 400
            raise WeightUpdateConflict(str(error)) from error
        if found.rank > self.config["max_lora_rank"]:
            raise WeightUpdateConflict(
                f"LoRA rank {found.rank} is greater than max_lora_rank {self.config['max_lora_rank']}."
            )
        contents = (file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file())
        self._adapters[name] = Adapter(name, path, blake2b(b"\0".join(contents), digest_size=8).hexdigest())

    def unload(self, name: str) -> None:
        if self._adapters.pop(name, None) is None:
            raise AdapterNotFound(f"The lora adapter '{name}' cannot be found.")
