"""Loads of received or stored tensors into the weights of a worker, in any engine."""
