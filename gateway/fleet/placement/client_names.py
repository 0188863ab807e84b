"""Names that clients choose for their requests and sessions, told apart by client: two may choose the same one."""

import hashlib


def name_of_client(client: str, name: str) -> str:
    """Return the name of a request or session of this client alone."""
    return f"{name}-{hashlib.blake2b(client.encode(), digest_size=4).hexdigest()}"
