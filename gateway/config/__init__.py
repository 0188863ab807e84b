"""The configuration: its schema, where values come from, and the Serve document made of it."""
