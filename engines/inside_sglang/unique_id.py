"""Reads the NCCL id that vLLM's trainer leaves in its store: a pickled ctypes structure.

Nothing is unpickled: that would need vLLM, and would run what the sender names.
"""

import pickletools

KEY = "broadcast_from/0/0"
"""Key of the id: the first object that rank 0 broadcasts."""
_NUM_BYTES = 128


def unique_id_of(pickled: bytes) -> bytes:
    """Return the id, the only byte string of its length. Raise `ValueError` where there is none, or more."""
    arguments = [argument for _, argument, _ in pickletools.genops(pickled)]
    found = {one for one in arguments if isinstance(one, bytes) and len(one) == _NUM_BYTES}
    if len(found) != 1:
        raise ValueError(f"the trainer's store holds {len(found)} NCCL ids instead of one: is its vLLM 0.28 or later?")
    return found.pop()
