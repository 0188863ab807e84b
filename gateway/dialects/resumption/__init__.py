"""Resumption: what a completion needs to continue from its tokens, after an update's cut or an engine's death.

The loop is `Runner.continue_sample`.
"""
