"""The loaded LoRA adapters of the policy, and the rollouts that use them."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from engines.errors import UnknownModel

_VERSIONED = re.compile(r"(\d+)$")


class Adapter:
    """One load of one adapter.

    `version` is the number that its name ends in, as in "trl-policy-v7"; a name without a number counts its loads.
    `load_id` differs for every load, so that loads never share KV.
    """

    def __init__(self, name: str, path: str, *, load_id: int, loads: int = 1) -> None:
        self.name = name
        self.path = path
        self.load_id = load_id
        numbered = _VERSIONED.search(name)
        self.version = int(numbered[1]) if numbered else loads
        self._uses: Counter[str] = Counter()
        self.is_leaving = False
        self.unused = asyncio.Event()
        self.unused.set()

    @property
    def users(self) -> int:
        return len(self._uses)

    @contextmanager
    def used(self, request_id: str, *, goes_on: bool = False) -> Iterator[None]:
        """Mark the adapter as used by a rollout, from the queue on; `goes_on` for the rest after an update cut it off.

        Raise `UnknownModel` where the adapter was unloaded, unless the rollout already uses it.
        """
        if self.is_leaving and not goes_on and request_id not in self._uses:
            raise UnknownModel(f"the LoRA adapter {self.name!r} was unloaded", param="model")
        self._uses[request_id] += 1
        self.unused.clear()
        try:
            yield
        finally:
            self._uses[request_id] -= 1
            if not self._uses[request_id]:
                del self._uses[request_id]
            if not self._uses:
                self.unused.set()


class Adapters:
    """The adapters that requests may name: every serving replica of the policy holds them."""

    def __init__(self) -> None:
        self._loaded: dict[str, Adapter] = {}
        self._loads: dict[str, int] = {}

    @property
    def loaded(self) -> list[Adapter]:
        return list(self._loaded.values())

    def get(self, name: object) -> Adapter | None:
        return self._loaded.get(name) if isinstance(name, str) else None

    def was_loaded(self, name: str) -> bool:
        """Return True where the name was ever loaded here, even if it was unloaded since."""
        return name in self._loads

    def next_load(self, name: str) -> int:
        """Return the ordinal of the next load of `name`, from 1."""
        return self._loads.get(name, 0) + 1

    def add(self, adapter: Adapter) -> None:
        self._loads[adapter.name] = self.next_load(adapter.name)
        self._loaded[adapter.name] = adapter

    def remove(self, adapter: Adapter) -> None:
        """Hide the adapter from new requests; running requests go on."""
        adapter.is_leaving = True
        if self._loaded.get(adapter.name) is adapter:
            del self._loaded[adapter.name]
