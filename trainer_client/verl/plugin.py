"""What verl imports, in each of its processes, to know us (entry point `verl.plugins`). Registering is all it does."""

import logging
import os

try:
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        from trainer_client.verl import cpu

        cpu.install()
    from trainer_client.verl import checkpoint_engine, trainer  # noqa: F401
    from trainer_client.verl import rollout_replica as replica  # noqa: F401
except Exception as error:
    # verl passes over a plugin that fails without a word, and then knows no trainer mode "gateway".
    logging.getLogger(__name__).error(
        "trainer.v1.trainer_mode=gateway is not available: %s: %s; it needs verl 0.9.1 with TransferQueue "
        "(pip install 'rollout-gateway[verl]')",
        type(error).__name__,
        error,
    )
    raise
