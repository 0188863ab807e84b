"""API processes of one vLLM engine agree on their adapters: vLLM's own lists, in processes of their own."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

pytest.importorskip("vllm")

from engines.inside_vllm.plugin import SHARED_ADAPTERS
from tests.rigs.engines.api_process import ApiProcess, api_process

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApiProcess, ApiProcess]]:
    env = {"TMPDIR": str(tmp_path_factory.mktemp("engine")), SHARED_ADAPTERS: "adapters"}
    env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "0"
    with ExitStack() as stack:
        one, other = (stack.enter_context(api_process(index, env)) for index in range(2))
        yield one, other


def test_an_adapter_loaded_in_one_serves_in_the_other_until_either_unloads_it(
    two: tuple[ApiProcess, ApiProcess],
) -> None:
    one, other = two
    assert other.call("use", "a") == 404
    assert one.call("load", "a", "/first") == 200
    first = one.call("use", "a")
    assert first[1] == "/first"
    assert other.call("use", "a") == first
    assert "a" in other.call("listed")
    assert other.call("load", "a", "/first") == 400  # it is there
    assert other.call("unload", "a") == 200
    assert one.call("use", "a") == 404
    assert one.call("unload", "a") == 404
    assert "a" not in one.call("listed")


def test_an_adapter_replaced_in_place_keeps_its_id_everywhere(two: tuple[ApiProcess, ApiProcess]) -> None:
    one, other = two
    assert one.call("load", "c", "/first") == 200
    number, _ = one.call("use", "c")
    assert other.call("load_in_place", "c", "/second") == 200
    assert one.call("use", "c") == (number, "/second")


def test_adapters_loaded_at_once_get_ids_of_their_own(two: tuple[ApiProcess, ApiProcess]) -> None:
    names = [[f"{side}{number}" for number in range(20)] for side in ("left", "right")]
    for process, mine in zip(two, names, strict=True):
        process.send(*(("load", name, f"/{name}") for name in mine))
    assert [process.results() for process in two] == [[200] * 20] * 2
    used = [[process.call("use", name) for side in names for name in side] for process in two]
    assert used[0] == used[1]
    assert len({number for number, _ in used[0]}) == 40
    assert {path for _, path in used[0]} == {f"/{name}" for side in names for name in side}


def test_each_process_takes_adapters_though_vllm_forbids_it_to_their_parent(two: tuple[ApiProcess, ApiProcess]) -> None:
    assert two[0].call("routes") == ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
