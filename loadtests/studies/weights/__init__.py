"""Studies of weight updates: their cost, their bytes, recovery."""
