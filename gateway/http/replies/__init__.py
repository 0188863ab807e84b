"""Bodies that are sent in parts."""
