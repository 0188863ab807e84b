"""Weight updates: one coordinator, the ways tensors take, the check of what replicas hold, and catching up."""
