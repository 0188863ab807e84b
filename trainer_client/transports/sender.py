"""`WeightSender`: pushes a trainer's weights to all replicas in one call. The first push loads torch."""

import os
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from engines.announcement import check_tensors
from engines.errors import ConfigError, WeightUpdateConflict
from engines.types import InFlight
from trainer_client.blocking import BlockingRolloutClient
from trainer_client.http import Json

if TYPE_CHECKING:
    import torch

    from trainer_client.transports.group import GroupTransport
    from trainer_client.transports.tensors import Part, Source

TransportName = Literal["store", "gloo", "nccl"]


class WeightSender:
    """Pushes weight versions of the policy to all replicas behind `client`.

    transport: "store" (a folder shared by trainer and engines, for vLLM and SGLang), or a group with all workers of
        all engines over "gloo" or "nccl"; default: the group that the engines receive over.
    timeout_s: limit on each wait: for a group, rollouts in flight, tensors, the commit.

    device: group only: the trainer's GPU for NCCL.
    address, port: group only: the trainer's listener; default: its address towards the gateway, and a free port.
    folder: store only: the store's path on this machine; default: the gateway's path.
    """

    def __init__(
        self,
        client: BlockingRolloutClient,
        *,
        transport: TransportName | None = None,
        device: "torch.device | str | None" = None,
        address: str = "",
        port: int = 0,
        folder: str | os.PathLike[str] | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if transport not in (None, "store", "gloo", "nccl"):
            raise ConfigError(f"transport = {transport!r} must be 'store', 'gloo' or 'nccl'")
        self._client = client
        self._name = transport
        self._timeout_s = timeout_s
        self._folder = folder
        self._of_group: dict[str, Any] = {"device": device, "address": address, "port": port}
        self._group: GroupTransport | None = None
        self._one_push = threading.Lock()

    def __enter__(self) -> "WeightSender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def push(
        self,
        named_tensors: "Source",
        version: int | None = None,
        *,
        canary_logprobs: Sequence[float] | None = None,
        in_flight: InFlight | Literal["keep", "recompute", "abort", "drain"] | None = None,
    ) -> int:
        """Let every replica serve these tensors. Return their version, the next one unless `version` is given.

        named_tensors: a model (plain, compiled or DDP), a mapping, or pairs of name and tensor, with checkpoint names.
            An iterator is read at most 1 GiB ahead and must give each tensor its own memory. Tensors that are not
            pushed are unchanged; over a group, tensors that vLLM fuses must be pushed together.
        canary_logprobs: the trainer's log-probs of the client's `canary_token_ids`, without the first.
        in_flight: rollouts in flight are frozen ("keep"), frozen and their KV recomputed ("recompute", also named
            "abort"), or awaited ("drain"); default: the gateway's.

        One process of a trainer pushes. Ranks of a sharded model gather its tensors, and one pushes them.

        Raises the gateway's error: `InvalidRequest` for names, shapes or dtypes that are not the model's,
        `WeightUpdateConflict` for a concurrent update or an impossible `version`, `WeightUpdateFailed` with the
        replica's name, `StoreFailed`, `DeadlineExceeded`, `GatewayUnreachable`. The version before stays served, and
        a push may be retried.
        """
        if in_flight is not None and in_flight not in (*InFlight, "abort"):
            raise ConfigError(f"in_flight = {in_flight!r} must be one of {', '.join(InFlight)}")
        terms = {"version": version, "in_flight": in_flight}
        canary = {} if canary_logprobs is None else {"canary_logprobs": [float(value) for value in canary_logprobs]}
        if not self._one_push.acquire(blocking=False):
            raise WeightUpdateConflict("a push of this sender is running: wait for its end")
        try:
            return self._push(named_tensors, {key: value for key, value in terms.items() if value is not None}, canary)
        finally:
            self._one_push.release()

    def close(self) -> None:
        """Leave the group, if any. May be called twice; the next push opens another."""
        if self._group is not None:
            self._group.close()

    def _push(self, named_tensors: "Source", terms: Json, canary: Json) -> int:
        import torch

        from trainer_client.transports import group, store

        with torch.inference_mode(False), torch.no_grad():  # in inference mode an iterator could gather no shards
            parts = self._checked_parts(named_tensors)
            parts = chain([next(parts)], parts)  # refuses tensors that do not fit before any effect
            if self._name == "store":
                return store.push(self._client, parts, terms | canary, self._timeout_s, self._folder)
            if self._group is None:
                self._group = group.GroupTransport(self._client, self._timeout_s, backend=self._name, **self._of_group)
            return self._group.push(parts, terms, canary)

    def _checked_parts(self, named_tensors: "Source") -> "Iterator[Part]":
        """Yield the parts, checked against the served model."""
        from trainer_client.transports.tensors import parts_of

        served = self._client.served_weights()
        for part in parts_of(named_tensors, served):
            check_tensors(part.announced, served, "named_tensors")
            if part.entries:
                part.wait_for_values()
                yield part
