"""The dialects that clients speak: decode and validate on the way in, put together on the way out."""
