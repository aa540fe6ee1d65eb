"""Sizes as people read them."""


def file_size(count: int) -> str:
    """``1.5 MB``; the units are powers of 1000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:,} bytes"
