"""More than one gateway process: workers that serve clients, and the owner of all that has to be known in one place."""
