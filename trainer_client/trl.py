"""Weight sync of TRL's trainers without CUDA: TRL's client with gloo instead of NCCL.

Call `install()` before the trainer is made; with CUDA it does nothing. engines/transfer/gloo.py moves the tensors.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import OK
from typing import Any, Self
from urllib.parse import urlsplit

import torch
from requests import RequestException, Response
from requests.adapters import HTTPAdapter
from trl.generation import vllm_client, vllm_generation
from trl.generation.vllm_client import VLLMClient
from urllib3.exceptions import ReadTimeoutError
from urllib3.util.retry import Retry

from engines.errors import WeightUpdateFailed
from engines.transfer.gloo import TIMEOUT_S, WeightGroup, address_towards, group_info, send
from engines.transfer.packing import NamedTensor

_WEIGHT_ROUTES = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
)
_CONNECT_TIMEOUT_S = 10.0
_GROUP_IS_OVER = 424


def install(timeout_s: float = TIMEOUT_S) -> None:
    """Make TRL's trainers use `GlooVLLMClient`, unless CUDA is available. `timeout_s` limits each wait of a sync."""
    if torch.cuda.is_available():
        return
    vllm_generation.VLLMClient = functools.partial(GlooVLLMClient, timeout_s=timeout_s)
    vllm_client.packed_nccl_broadcast_producer = send_packed


def send_packed(
    iterator: Iterator[NamedTensor],
    group: WeightGroup,
    src: int,
    post_iter_func: Callable[[NamedTensor], torch.Tensor],
) -> None:
    """Send over gloo in place of vLLM's `packed_nccl_broadcast_producer`; the trainer is `src`, which is 0."""
    try:
        send(((named[0], post_iter_func(named)) for named in iterator), group)
    except BaseException as error:  # which TRL raises after the engines' answer
        group.close(f"the trainer failed: {type(error).__name__}: {error}")
        raise


class _Replayed(Retry):
    """Repeats a call whose connection broke, as TRL's own client does: a gateway that was restarted knows what it has
    done of it. A call without an answer is not repeated."""

    def increment(self, *args: Any, **kwargs: Any) -> Self:
        if isinstance(error := kwargs.get("error"), ReadTimeoutError):
            raise error
        return super().increment(*args, **kwargs)


class GlooVLLMClient(VLLMClient):
    """TRL's client over gloo, with bounded waits in a weight sync.

    A failed weight call ends the broadcast beside it, with the server's reason, and the group: the next update opens
    another.
    """

    communicator: WeightGroup | None
    weight_version: int | None = None
    """The version of the last update; None from a plain vLLM, which does not report it."""

    def __init__(self, *args: Any, timeout_s: float = TIMEOUT_S, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timeout_s = timeout_s
        self._is_over = False
        replayed = HTTPAdapter(max_retries=_Replayed(5, status=0, other=0, backoff_factor=2, allowed_methods=None))
        for route in _WEIGHT_ROUTES:
            self.session.mount(f"{self.base_url}{route}", replayed)

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Join the engines in a gloo group. Weights are copied from `device`."""
        if self.get_server_info()["weight_transfer_config"] is None:
            raise RuntimeError(f"{self.base_url} has no weight transfer: start its engines with the gloo backend")
        server = urlsplit(self.base_url)
        address = address_towards(server.hostname or "", server.port or 80)
        world_size = self.get_world_size() + 1
        info = group_info(address, self.group_port, world_size)
        self.close_communicator()
        self.communicator = group = WeightGroup(address, self.group_port, 0, world_size, self._timeout_s)
        self._is_over = False
        group.listen()
        with ThreadPoolExecutor(max_workers=1) as beside:
            answer = beside.submit(self._post, f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info})
            group.join()
            answer.result()
        self._place = f"{address}:{self.group_port}"

    def close_communicator(self) -> None:
        """Leave the group; waiting engines are released."""
        if self.communicator is not None:
            self.communicator.close()
            self.communicator = None

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """Group several tensors into one update. An error in the block ends it without a commit, where TRL's own client
        would have the engines serve the tensors that have been sent."""
        self._start_weight_update()
        self._updating_weights = True
        try:
            yield
        except BaseException as error:
            # The trainer needs its own error. A plain vLLM has no such route, and leaves the update open.
            with contextlib.suppress(RequestException):
                reason = {"reason": f"{type(error).__name__}: {error}"}
                self.session.delete(f"{self.base_url}/v1/weight_updates", json=reason, timeout=self._timeouts)
            raise
        finally:
            self._updating_weights = False
        self._finish_weight_update()

    def _start_weight_update(self) -> None:
        """Open the update. Where the group is over, as after a refusal or a gateway's restart, open another first."""
        if self.communicator is None or self._is_over:
            self.init_communicator()
        answer = self._start()
        if answer.status_code == _GROUP_IS_OVER:
            self.init_communicator()
            answer = self._start()
        if answer.status_code != OK:
            raise WeightUpdateFailed(f"/start_weight_update failed: {answer.status_code}, {answer.text}")

    def _start(self) -> Response:
        url = f"{self.base_url}/start_weight_update"
        answer: Response = self.session.post(url, json={"group": self._place}, timeout=self._timeouts)
        return answer

    @property
    def _timeouts(self) -> tuple[float, float]:
        return _CONNECT_TIMEOUT_S, self._timeout_s

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        route = url.removeprefix(self.base_url)
        if route not in _WEIGHT_ROUTES:
            return dict(super()._post(url, **kwargs))
        try:
            reply: dict[str, Any] = super()._post(url, timeout=self._timeouts, **kwargs)
        except Exception as error:
            self._is_over = True
            if self.communicator is not None:
                self.communicator.give_up(f"{route} failed: {error}")
            raise WeightUpdateFailed(f"{route} failed: {error}") from error
        if route == "/finish_weight_update":
            self.weight_version = reply.get("weight_version")
        return reply
