"""Sessions of agents: the routes, what the gateway recorded, and rows of training made of it."""
