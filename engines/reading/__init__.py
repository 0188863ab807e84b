"""Reads what engines make."""
