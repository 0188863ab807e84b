"""A written draft is whole."""

import errno

import pytest

from engines.errors import StoreFailed
from engines.store import draft as draft_module
from engines.store.draft import Draft
from engines.store.manifest import check_bytes
from engines.store.weight_store import WeightStore
from tests.material.drafts import file_bytes, tensor, written


def test_files_of_the_store_are_read_by_the_safetensors_library(store: WeightStore) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    from engines.transfer.tensor_bytes import raw_tensor

    sent = {"w": torch.randn(3, 5, dtype=torch.bfloat16), "s": torch.tensor(2.0), "t": torch.randn(4, 6).t()}
    folder = store.draft()
    draft = Draft(folder, "m")
    draft.add([raw_tensor(name, one) for name, one in sent.items()])
    draft.finish()
    loaded = load_file(folder / "model-00001.safetensors")
    assert loaded.keys() == sent.keys()
    assert all(torch.equal(loaded[name], one) for name, one in sent.items())
    check_bytes(folder)


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.draft()
    draft = Draft(folder, "m")
    draft.add([tensor("a", 1)])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(draft_module, "write_file", full)
    with pytest.raises(StoreFailed, match=r"disk of the weight store is full.*weights\.store"):
        draft.add([tensor("b", 1)])
    store.discard(folder)
    assert not list(store.folder.glob("draft-*"))
    assert not list(store.folder.glob("v*"))


def test_tensors_that_never_came_are_taken_from_the_version_before(store: WeightStore) -> None:
    before = store.promote(written(store, 1, "a", "b", "c"), "1", None)
    folder = store.draft()
    draft = Draft(folder, "m")
    draft.add([tensor("b", 2)])
    draft.complete_from(before, ["a", "b", "c"])
    draft.finish()
    check_bytes(folder)
    assert [file_bytes(folder, name)[0] for name in "abc"] == [1, 2, 1]


def test_a_base_that_lacks_a_tensor_is_named(store: WeightStore) -> None:
    before = store.promote(written(store, 1, "a"), "1", None)
    draft = Draft(store.draft(), "m")
    with pytest.raises(StoreFailed, match="'a' was not sent, and the version before is not kept"):
        draft.complete_from(None, ["a"])
    with pytest.raises(StoreFailed, match="lacks tensor 'z'"):
        draft.complete_from(before, ["a", "z"])


def test_a_tensor_that_comes_twice_in_two_files_is_refused(store: WeightStore) -> None:
    draft = Draft(store.draft(), "m")
    draft.add([tensor("a", 1)])
    with pytest.raises(StoreFailed, match="'a' came twice"):
        draft.add([tensor("a", 2)])


def test_a_file_whose_tensors_all_stay_is_linked(store: WeightStore) -> None:
    before = store.promote(written(store, 1, "a"), "1", None)
    folder = store.draft()
    draft = Draft(folder, "m")
    draft.add([tensor("b", 3)])
    draft.complete_from(before, ["a", "b"])
    draft.finish()
    assert (folder / check_bytes(folder).tensors["a"].file).stat().st_nlink == 2
