"""A mend of vLLM's rendezvous over NCCL (0.26 to 0.32), which waits 300 s for a trainer that has died."""

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
        if init_info.master_address is not None and init_info.master_port is not None:
            until_listening(init_info.master_address, init_info.master_port)
        join(init_info)

    find_and_join.finds_trainer = True  # type: ignore[attr-defined]
    engine.init_transfer_engine = find_and_join
