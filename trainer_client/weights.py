"""Weights through the store: a trainer writes a version into a folder that engines see too, and announces it.

For trainers on the same node (memory: /dev/shm) or the same file system, whatever the engines are; no process group, so
nobody hangs when somebody dies. Importing this loads no torch.
"""

import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.errors import DeadlineExceeded, GatewayUnreachable, StoreFailed
from engines.weight_store import SHARD_BYTES, Draft, RawTensor, claim_draft
from gateway.api import error_of

if TYPE_CHECKING:
    import torch

_ASK_TIMEOUT_S = 30.0


class WeightSender:
    """Sends versions of one policy to the gateway at `url`.

    `folder` is the gateway's weight store as this machine sees it; what the gateway calls it unless given. `api_key` is
    an admin key, where the gateway wants one. `timeout_s` bounds the gateway's part of a push.
    """

    def __init__(
        self, url: str, *, api_key: str = "", folder: str | os.PathLike[str] | None = None, timeout_s: float = 1200.0
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._folder = Path(folder) if folder is not None else None
        self._timeout_s = timeout_s

    def push(self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", version: int | None = None) -> int:
        """Write a version and have every replica serve it. Returns its number: the next one unless `version` is given.

        Names are the checkpoint's. Tensors that are left out stay as they are, so a trainer may send what changed.
        Raises `InvalidRequest` where they do not fit the model, `WeightUpdateConflict` where another update is under
        way, `WeightUpdateFailed` with the replica's name where one did not take them, `DeadlineExceeded` after a
        bounded wait, `GatewayUnreachable`, and `StoreFailed` where the store has no room or cannot be reached. The
        version before is served then.
        """
        store = self._ask("GET", "/v1/weight_store", None, _ASK_TIMEOUT_S)
        folder = self._folder or Path(store["folder"])
        if not folder.is_dir():
            raise StoreFailed(
                f"the gateway's weight store {store['folder']} is not at {folder} here: share weights.store with this "
                "machine, and give its folder here to WeightSender"
            )
        draft, owner = claim_draft(folder)
        try:
            _write(Draft(draft, store["model"]), named_tensors)
            body = {"transport": "store", "snapshot": draft.name, "version": version}
            return int(self._ask("POST", "/v1/weight_updates", body, self._timeout_s)["weight_version"])
        finally:
            shutil.rmtree(draft, ignore_errors=True)  # where it became a version it is not there any more
            os.close(owner)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                reply: dict[str, Any] = json.load(response)
                return reply
        except urllib.error.HTTPError as error:
            raise error_of(error.code, _decoded(error.read())) from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._url}{path} did not answer within {timeout_s:g} s") from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise DeadlineExceeded(f"{self._url}{path} did not answer within {timeout_s:g} s") from error
            raise GatewayUnreachable(f"{self._url}{path}: {error.reason}") from error


def _write(draft: Draft, named_tensors: "Iterable[tuple[str, torch.Tensor]]") -> None:
    for shard in _shards(named_tensors):
        draft.add(shard)
    draft.finish()


def _shards(named_tensors: "Iterable[tuple[str, torch.Tensor]]") -> Iterator[list[RawTensor]]:
    """Host copies of the tensors, as many as make a file."""
    from engines.tensor_bytes import raw_tensor

    shard: list[RawTensor] = []
    size = 0
    for name, tensor in named_tensors:
        shard.append(raw_tensor(name, tensor))
        size += shard[-1].num_bytes
        if size >= SHARD_BYTES:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content[:500].decode(errors="replace")
