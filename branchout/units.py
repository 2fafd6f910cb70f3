"""Numbers as people read them: in the report, on the command line and in the results pages."""

from __future__ import annotations

MINUS = "\N{MINUS SIGN}"


def percent(share: float | None) -> str:
    """A share between 0 and 1 in percent, with one digit; – for none."""
    return "–" if share is None else f"{100 * share:.1f}"


def change(before: float | None, after: float | None) -> str:
    """The difference of two shares in percentage points, with a sign: that of the rounded numbers beside it."""
    if before is None or after is None:
        return ""
    return signed(round(float(percent(after)) - float(percent(before)), 1))


def signed(number: float) -> str:
    """`+3`, `−0.5`, or `±0`."""
    return f"{'+' if number > 0 else MINUS}{abs(number):,}" if number else "±0"


def count(number: int, thing: str, several: str = "") -> str:
    """`1 image`, `2,000 images`."""
    return f"{number:,} {thing if number == 1 else several or thing + 's'}"


def size(number: float, unit: str = " {}B") -> str:
    """A number of bytes: `4.5 MB`."""
    for prefix, step in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= step:
            return f"{number / step:.1f}{unit.format(prefix)}"
    return f"{number:.0f}{unit.format('')}"


def parameters(number: float) -> str:
    """A number of parameters: `11.2M`."""
    return size(number, "{}")


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def date(when: str) -> str:
    """A time stamp of the history to the minute: `2026-01-31 12:05 UTC`."""
    day, _, hour = when.partition("T")
    return f"{day} {hour.removesuffix('+00:00')[:5]}{' UTC' if when.endswith('+00:00') else ''}".strip()


def setting(values: list[float]) -> str:
    """Where an operating point lies: `b = +1.250`, or `α = 0.1, β = 2`."""
    if len(values) == 2:
        return f"α = {values[0]:g}, β = {values[1]:g}"
    return f"b = {values[0]:+.3f}".replace("-", MINUS)
