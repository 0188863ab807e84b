"""Agents by URL: their dialects as words around one token path."""
