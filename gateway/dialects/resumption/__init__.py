"""Resumption: a completion that an update cut off continues from its tokens."""
