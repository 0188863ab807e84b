"""Clients of a chaos run, which check every token."""
