"""Weight senders: pushed tensors and their transports."""
