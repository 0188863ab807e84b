"""One door in front of many replicas: admits, routes, and keeps weights in step."""
