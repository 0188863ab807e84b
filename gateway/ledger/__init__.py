"""The ledger: files that bring batches and sessions over a restart of the gateway."""
