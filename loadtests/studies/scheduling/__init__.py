"""Studies of placement, admission and batches, on engines and in virtual time."""
