"""Numbers as people read them."""


def size(count: float) -> str:
    """Bytes or parameters: 1.3G, 25.6M."""
    for unit, step in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= step:
            return f"{count / step:.1f}{unit}"
    return f"{count:.0f}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
