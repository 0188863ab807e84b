"""Engines' replies as bytes: carried, joined and written."""
