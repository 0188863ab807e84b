"""Tensors as trainers hold them, under the names and in the shapes of the served checkpoint.

A trainer's module may have other names than its checkpoint: transformers 5 joins experts and renames the parts of
vision-language models when it loads, and turns that back when it saves. The same tables of transformers are used here,
where it is installed, for tensors that the checkpoint does not have under the given name.
"""

import json
import logging
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, TypeVar

import torch

from engines.checkpoint.folder import ties_embeddings
from engines.errors import InvalidRequest

NamedTensor = tuple[str, torch.Tensor]

log = logging.getLogger("vllm.rollout_gateway")  # a child of vLLM's logger, whose handlers it uses

_WRAPPERS = re.compile(r"\b(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
_PARALLEL = re.compile(r"(^|\.)module\.")
"""The part of a name that DistributedDataParallel and DataParallel add."""
_ONE_THREAD = threading.RLock()

T = TypeVar("T")


def clean(name: str) -> str:
    """Return the name without the parts that FSDP, activation checkpointing and torch.compile add."""
    return _WRAPPERS.sub("", name)


class _Once(cached_property[T]):
    """A property that one thread makes, while others wait for it."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        with _ONE_THREAD:
            return super().__get__(instance, owner)


class CheckpointNames:
    """The names of one served checkpoint.

    names: of its tensors; none where they are unknown, and all are then left as they are.
    config: content of its config.json; "" where unknown.
    tied: pairs of names that the checkpoint has for one tensor.
    """

    def __init__(self, names: Iterable[str] = (), config: str = "", tied: Iterable[Sequence[str]] = ()) -> None:
        self._names = frozenset(names)
        self._config = config
        self._forms: dict[tuple[object, ...], dict[str, tuple[int, ...]]] = {}
        self._together = {name: tuple(group) for group in tied for name in group}

    def prepare(self) -> None:
        """Make now what an update may need, as this takes seconds. Only tensors of other names, or ties, need it."""
        if self._names:
            _ = self._tables, self._tied_names

    def are_tied(self, name: str) -> bool:
        """Return True for a name of a tensor that has another name too."""
        name = self._spelled(name)
        return name in self._together or name in self._tied_names

    def has(self, name: str, shape: Sequence[int]) -> bool:
        """Return True for a name whose tensor the checkpoint has itself, and not only under a tied one."""
        return bool(self._names) and self._own(self._spelled(name), torch.empty(shape, device="meta")) is not None

    def forms(self, given: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the checkpoint's tensors that a tensor of this shape holds. Raise as `converted`."""
        known = self._forms.get((given, *shape))
        if known is None:
            found = self.converted(given, torch.empty(shape, device="meta"))
            known = self._forms[(given, *shape)] = {name: tuple(tensor.shape) for name, tensor in found.items()}
        return known

    def lacks_buffer(self, name: str) -> bool:
        """Return True for a buffer of the model that its checkpoint does not have, such as a cache of angles."""
        return bool(self._names) and self._spelled(name) not in self._names and self._spelled(name) in self._buffers

    def converted(self, given: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the checkpoint's tensors that this tensor holds, by name: views of it where strides allow.

        A tensor on the meta device gives the shapes. Raise `InvalidRequest` where the checkpoint has no such tensor.
        """
        if not self._names:
            return {clean(given): tensor}
        name = self._spelled(given)
        others = self._tied_names.get(name, ()) if name not in self._names else ()
        found = next(filter(None, (self._own(one, tensor) for one in (name, *others))), None)
        if found is None:
            raise InvalidRequest(self._refusal(given, name, tensor), param="named_tensors")
        return {target: part.contiguous() for one, part in found.items() for target in self._together.get(one, (one,))}

    def _spelled(self, given: str) -> str:
        name = clean(given)
        return name if name in self._names else _PARALLEL.sub(r"\1", name)

    def _own(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if name in self._names:
            return {name: tensor}
        found = chain([{name: tensor}], (table.reverted(name, tensor) for table in self._tables))
        return next(
            (one for form in found if form for one in (form, self._bare(form)) if one.keys() <= self._names), None
        )

    def _bare(self, form: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the form as of the base model alone, whose checkpoint is served with a head too, such as GPT-2's."""
        prefix = f"{self._model.base_model_prefix}." if self._model is not None else ""
        return {name.removeprefix(prefix): part for name, part in form.items()}

    def _refusal(self, given: str, name: str, tensor: torch.Tensor) -> str:
        became = next((min(found) for table in self._tables if (found := table.reverted(name, tensor))), name)
        nearest = get_close_matches(became, self._names, 1, 0.0)
        told = f" ({became!r} in a checkpoint)" if became != given else ""
        return (
            f"named_tensors has {given!r}{told}, which the served checkpoint does not have; its nearest name is "
            f"{nearest[0] if nearest else 'none'!r}: send the tensors of the served model"
        )

    @_Once
    def _model(self) -> Any:
        """The model on the meta device, as transformers would make it; None where it has no such class.

        A checkpoint with code of its own may be trained by transformers' class, without `trust_remote_code`.
        """
        name = next(iter(json.loads(self._config or "{}").get("architectures") or ()), None)
        if name is None:
            return None
        try:
            import transformers
        except ImportError:
            return None
        architecture = getattr(transformers, name, None)
        if architecture is None:
            return None
        try:
            with TemporaryDirectory() as folder, torch.device("meta"):
                (file := Path(folder, "config.json")).write_text(self._config, encoding="utf-8")
                # which reads Infinity as it was written
                return architecture(architecture.config_class.from_json_file(file))
        except Exception:  # an engine may serve a config.json that transformers does not take
            log.exception("transformers cannot make %s: tensors keep the names they come with", architecture.__name__)
            return None

    @_Once
    def _buffers(self) -> frozenset[str]:
        return frozenset(dict(self._model.named_buffers(remove_duplicate=False)) if self._model is not None else ())

    @_Once
    def _tables(self) -> "list[_Table]":
        """The ways back: as save_pretrained goes, then with prefixes that a checkpoint may or may not have."""
        if not _may_convert(self._config) or self._model is None:
            return []
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        conversions = get_model_conversion_mapping(self._model, add_legacy=False)
        plain = [one for one in conversions if not isinstance(one, PrefixChange)]
        return [_Table(self._model, one) for one in (plain, conversions)]

    @_Once
    def _tied_names(self) -> Mapping[str, tuple[str, ...]]:
        """Other names of tensors that the model's class ties, by name."""
        if not (self._names and ties_embeddings(self._config)):
            return {}
        same = defaultdict[int, set[str]](set)
        for name, parameter in self._model.named_parameters(remove_duplicate=False) if self._model is not None else ():
            same[id(parameter)].add(name)
        # Most code that transformers does not have names the two as Llama does.
        others = ({name, name.replace("model.embed_tokens.", "lm_head.")} for name in self._names)
        groups = others if self._model is None else same.values()
        return {
            name: tuple(sorted(group - {name})) for group in groups for name in group
            if len(group) > 1 and not group <= self._names
        }  # fmt: skip


@lru_cache(maxsize=2)
def _kept(names: tuple[str, ...], config: str, tied: tuple[tuple[str, ...], ...]) -> CheckpointNames:
    return CheckpointNames(names, config, tied)


def checkpoint_names(names: Iterable[str], config: str, tied: Iterable[Sequence[str]]) -> CheckpointNames:
    """Return the names of a checkpoint, with what was made for them before: updates ask again and again."""
    return _kept(tuple(names), config, tuple(map(tuple, tied)))


def _may_convert(config: str) -> bool:
    """Return True where transformers may give a model's tensors other names than its checkpoint has."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:
        return False
    found = json.loads(config or "{}")
    parts = [one for one in found.values() if isinstance(one, dict) and "model_type" in one]
    kinds = *(found.get("architectures") or ()), found.get("model_type")
    return bool(parts) or any(get_checkpoint_conversion_mapping(kind) for kind in kinds)


class _Table:
    """The reverse of transformers' conversions of one model."""

    def __init__(self, model: Any, conversions: Sequence[Any]) -> None:
        from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

        class Views(Chunk):  # type: ignore[misc]
            """Chunks without the copies that transformers makes."""

            def convert(self, given: Any, source_patterns: Any, target_patterns: Any, **about: Any) -> Any:
                (tensor,) = (one[0] if isinstance(one, list) else one for one in given.values())
                targets = self.get_target_patterns(target_patterns, **about)
                return dict(zip(targets, torch.chunk(tensor, len(targets), dim=self.dim), strict=True))

        self._model = model
        back = [one.reverse_transform() for one in reversed(conversions)]
        self._renamings = [one for one in back if isinstance(one, WeightRenaming)]
        self._converters = [one for one in back if isinstance(one, WeightConverter)]
        for one in self._converters:
            one.operations = [
                Views(step.dim, step.num_shards_attribute) if type(step) is Chunk else step for step in one.operations
            ]
        self._by_pattern = {pattern: one for one in self._converters for pattern in one.source_patterns}

    def reverted(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """Return the tensors of a checkpoint that this tensor holds; None for one of several that make one."""
        from transformers.core_model_loading import rename_source_key

        renamed, pattern = rename_source_key(name, self._renamings, self._converters, reverse=True)
        if pattern is None:
            return {renamed: tensor}
        if len(self._by_pattern[pattern].source_patterns) > 1:
            return None
        converter = deepcopy(self._by_pattern[pattern])
        converter.add_tensor(renamed, name, pattern, tensor)
        made = converter.convert(renamed, model=self._model, config=self._model.config)
        return {target: part[0] if isinstance(part, list) else part for target, part in made.items()}


class Ties(Generic[T]):
    """The tied tensors of one update that have come, which may come again under their other names.

    are_equal: compares two tensors that have come under two names.
    """

    def __init__(self, names: CheckpointNames, are_equal: Callable[[T, T], bool]) -> None:
        self._names = names
        self._are_equal = are_equal
        self._known: dict[str, tuple[str, T]] = {}

    def has(self, target: str, name: str, tensor: T) -> bool:
        """Return True for a tensor of the checkpoint that has come under another name than this one.

        Raise `InvalidRequest` for one that has come with other values.
        """
        before, held = self._known.get(target, (name, tensor))
        if before != name:
            if not self._are_equal(held, tensor):
                raise _untied(before, name)
            return True
        if self._names.are_tied(target) or self._names.are_tied(name):
            self._known[target] = name, tensor
        return False


class Incoming:
    """The tensors of one update, under the checkpoint's names."""

    def __init__(self, names: CheckpointNames) -> None:
        self._names = names
        self._ties = Ties(names, _are_equal)

    def converted(self, tensors: Iterable[NamedTensor]) -> list[NamedTensor]:
        """Return tensors of the checkpoint. Raise `InvalidRequest` for a name that it does not have, and for a tied
        tensor that comes under two names with two contents."""
        return [
            (target, part)
            for name, tensor in tensors
            for target, part in self._names.converted(name, tensor).items()
            if not self._ties.has(target, name, part)
        ]


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True for equal values, and for tensors on the meta device, which have none."""
    return bool(first.is_meta or (first.shape == second.shape and torch.equal(first, second.to(first))))


def _untied(first: str, second: str) -> InvalidRequest:
    """Return the error for two contents of one tied tensor."""
    return InvalidRequest(
        f"named_tensors has different values for {first!r} and {second!r}, which the served model ties to one tensor: "
        "send one of them, or serve a checkpoint whose config.json has tie_word_embeddings: false",
        param="named_tensors",
    )


def announced_as(names: CheckpointNames, announced: Mapping[str, Any]) -> dict[str, Any]:
    """Return the announcement of /update_weights with the checkpoint's names and shapes, or `refused` with why not."""
    dtypes = announced.get("dtype_names") or ["float32"] * len(announced["names"])
    if unknown := [dtype for dtype in dtypes if not isinstance(getattr(torch, dtype, None), torch.dtype)]:
        return {"refused": f"update_info.dtype_names has {unknown[0]!r}, which torch does not have"}
    given = zip(announced["names"], dtypes, announced["shapes"], strict=True)
    metas = [(name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta")) for name, dtype, shape in given]
    try:
        made = Incoming(names).converted(metas)
    except InvalidRequest as error:
        return {"refused": str(error)}
    return {
        **announced,
        "names": [name for name, _ in made],
        "shapes": [list(tensor.shape) for _, tensor in made],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in made],
    }
