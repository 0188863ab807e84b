"""The processes of a chaos run: gateways, and fleets of engines."""
