"""A mend of vLLM's rendezvous over NCCL (0.28 to 0.32), which waits 300 s for a trainer that has died."""

from typing import Any

from engines.transfer.listener import until_listening


def find_trainer_first(engine: Any) -> None:
    """Let a transfer engine of vLLM join no group before its trainer listens, once for each engine.

    The wait of vLLM's store takes the whole of its limit, and the worker answers no other call meanwhile.
    """
    join = getattr(engine, "init_transfer_engine", None)
    if join is None or hasattr(join, "finds_trainer"):
        return

    def find_and_join(init_info: Any) -> None:
        # Backends without a rendezvous, such as CUDA IPC, name no place.
        address, port = (getattr(init_info, name, None) for name in ("master_address", "master_port"))
        if address is not None and port is not None:
            until_listening(address, port)
        join(init_info)

    find_and_join.finds_trainer = True  # type: ignore[attr-defined]
    engine.init_transfer_engine = find_and_join
