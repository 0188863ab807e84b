"""Runs the gateway's own scheduler against models of engines, in virtual time."""
