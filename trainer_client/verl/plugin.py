"""The plugin that verl imports in each process (entry point `verl.plugins`). It only registers our classes."""

import logging

try:
    from trainer_client.verl import trainer  # noqa: F401
except Exception as error:
    # verl ignores a failed plugin silently; trainer mode "gateway" is then unknown.
    logging.getLogger(__name__).error(
        "trainer.v1.trainer_mode=gateway is not available: %s: %s; it needs verl 0.9.1 with TransferQueue "
        "(pip install 'rollout-gateway[verl]')",
        type(error).__name__,
        error,
    )
    raise
