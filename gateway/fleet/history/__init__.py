"""What has happened to the fleet, for people: events, and states over time."""
