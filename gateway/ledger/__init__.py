"""The ledger: files that bring submissions and batches over a restart of the gateway."""
