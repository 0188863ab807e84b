"""Weight senders: what a trainer pushes, and the transports that carry it."""
