"""Numbers, sizes and times as the command line shows them. Pure."""

NONE = "–"


def short(value: float | None) -> str:
    """Format a number with about three digits."""
    if value is None:
        return NONE
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value / size:,.0f} {unit}"
    return f"{value:.3g}"


def size(number: float) -> str:
    """Format a number of bytes with about three digits."""
    return f"{short(number / 1e9)} GB" if number >= 1e9 else f"{short(number / 1e6)} MB"


def milliseconds(seconds: float | None) -> str:
    """Format a duration with about three digits."""
    if seconds is None:
        return NONE
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def span(seconds: float) -> str:
    """Format a duration in its largest unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"
