"""Weight transfer: process groups, packed chunks, digests, and the relay process."""
