"""The rollout URL: server, access, and every route that is not a dialect of its own."""
