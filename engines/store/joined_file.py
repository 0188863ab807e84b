"""Writes a safetensors file: the tensors of another file with changed elements. A thread per tensor."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from engines.checkpoint import Span
from engines.store.changed_elements import ChangedElements
from engines.store.files import read_at, write_at
from engines.store.tensor_file import header

_THREADS = 4
"""Tensors held in memory at a time."""


def write_joined(target: Path, base: Path, spans: Sequence[Span], changes: Callable[[str], ChangedElements]) -> None:
    """Write file `target` of these tensors of file `base`, each with its changes.

    Raises `OSError`, and what `changes` and applying them raise.
    """
    spans = sorted(spans, key=lambda span: span.begin)  # wide elements stay before narrow ones, to stay aligned
    head, places = header(spans)
    with base.open("rb") as source, target.open("wb", buffering=0) as file:
        file.write(head)
        file.truncate(len(head) + sum(span.num_bytes for span in spans))

        def join(span: Span, place: int) -> None:
            content = np.empty(span.num_bytes, np.uint8)
            read_at(source, content.data, span.begin)
            changes(span.name).apply_to(content)
            write_at(file.fileno(), content.data, place)

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="join") as pool:
            for done in [pool.submit(join, span, place) for span, place in zip(spans, places, strict=True)]:
                done.result()
        os.fsync(file.fileno())
