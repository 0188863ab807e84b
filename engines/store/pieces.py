"""Writes a file whose bytes come in pieces, here or in a process of its own that shares memory with an engine's.

In an engine's process each call waits for its turn at Python's lock, and the engine's next step for that call. The
process runs this file alone, as the environment of an engine may not have this package: it imports nothing of ours.

    python -P pieces.py FD      # `PieceWriter` starts it; it ends with its standard input
"""

import json
import mmap
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

import xxhash

HEAD = "latin-1"
"""A header begins with its length, whose bytes are no text in UTF-8."""


def write_pieces(
    path: str, head: bytes, sizes: Sequence[int], wanted: Sequence[bool], pieces: Iterable[memoryview]
) -> list[str]:
    """Write `head` and the bytes of tensors of these `sizes`, which come in order and are cut anywhere. Return the
    XXH3-128 of each that is `wanted`, else "".

    Raises `OSError`, and what `pieces` raises.
    """
    digests = [xxhash.xxh3_128() if is_wanted else None for is_wanted in wanted]
    index, left = 0, sizes[0] if sizes else 0
    with open(path, "wb", buffering=0) as file:
        _write(file.fileno(), memoryview(head))
        for piece in pieces:
            _write(file.fileno(), piece)
            while piece:
                while not left:
                    index += 1
                    left = sizes[index]
                part, piece = piece[:left], piece[left:]
                if (digest := digests[index]) is not None:
                    digest.update(part)
                left -= len(part)
        os.fsync(file.fileno())
    return [digest.hexdigest() if digest is not None else "" for digest in digests]


def _write(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _received(said: TextIO, memory: memoryview, num_bytes: int) -> Iterator[memoryview]:
    """Yield a file's pieces; tell that each is written once the next is asked for."""
    while num_bytes:
        begin, length = json.loads(said.readline())
        yield memory[begin : begin + length]
        num_bytes -= length
        _tell({"digests": []})


def _tell(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


def _serve(descriptor: int, said: TextIO) -> None:
    memory = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    while line := said.readline():
        told = json.loads(line)
        pieces = _received(said, memory, sum(told["sizes"]))
        try:
            digests = write_pieces(told["path"], told["head"].encode(HEAD), told["sizes"], told["wanted"], pieces)
        except OSError as error:
            _tell({"errno": error.errno, "error": error.strerror})
            return
        _tell({"digests": digests})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine's process ends it
    _serve(int(sys.argv[1]), sys.stdin)
