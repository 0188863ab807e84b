"""A page with one generated part, between two marks."""


def with_part(page: str, begin: str, part: str, end: str) -> str:
    """The page with `part` between its marks. Raises `ValueError` where it has none."""
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"no place for a generated part: {begin!r} and {end!r} are missing")
    return before + begin + part + end + after
