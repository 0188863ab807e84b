"""Reads what engines make, beside them or in the gateway's process."""
