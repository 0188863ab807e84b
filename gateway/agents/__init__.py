"""Agents by URL: their dialects as words around one token path, and the record of their sessions."""
