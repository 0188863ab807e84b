"""The ledger: a file that brings submissions over a restart of the gateway."""
