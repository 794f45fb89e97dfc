"""Picture of a load as SVG: latency over time, and by percentile. Pure."""

import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from gateway.cli.bench_load import Figures

WIDTH, HEIGHT = 480, 260
LEFT, BOTTOM, TOP, RIGHT = 64, 36, 40, 16
SHARES = (0.0, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 0.9995, 0.9999)
LINES = (("p50", 0.5, "#0b5cad"), ("p99", 0.99, "#a8201a"))
TICKS = 4


def draw(figures: Figures, title: str) -> str:
    """Return the picture of the latencies."""
    seconds = sorted(figures.by_second)
    over_time = [
        (name, color, [(second, _ms(figures.by_second[second].quantile_s(share))) for second in seconds])
        for name, share, color in LINES
    ]
    # A percentile needs some calls above it.
    shown = [share for share in SHARES if figures.latencies.count * (1 - share) >= 1]
    nines = [(_nines(share), _ms(figures.latencies.quantile_s(share))) for share in shown]
    size = f"0 0 {WIDTH * 2} {HEIGHT + 24}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="12" y="18" font-size="14" font-weight="bold">{escape(title)}</text>',
        *_panel(0, "latency over time, ms by second", over_time, lambda x: f"{x:g} s"),
        *_panel(WIDTH, "latency by percentile, ms", [("all calls", LINES[0][2], nines)], _percent),
        "</svg>",
    ]
    return "\n".join(parts)


def _ms(seconds: float | None) -> float:
    return 0.0 if seconds is None else seconds * 1000


def _nines(share: float) -> float:
    """Return the place of a percentile on an axis on which each further nine takes as much room."""
    return -math.log10(1 - share)


def _percent(nines: float) -> str:
    return f"{100 * (1 - 10**-nines):.4g} %"


def _panel(
    offset: int,
    title: str,
    lines: Sequence[tuple[str, str, Sequence[tuple[float, float]]]],
    name_x: Callable[[float], str],
) -> list[str]:
    points = [point for _, _, line in lines for point in line]
    x_max = max((x for x, _ in points), default=1.0) or 1.0
    y_max = max((y for _, y in points), default=1.0) or 1.0
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            offset + LEFT + inner_width * x / x_max,
            24 + TOP + inner_height * (1 - y / (y_max * 1.05)),
        )

    parts = [f'<text x="{offset + LEFT}" y="{24 + TOP - 14}" font-weight="bold">{escape(title)}</text>']
    for tick in range(TICKS + 1):
        x, y = x_max * tick / TICKS, y_max * tick / TICKS
        (_, row), (column, base) = place(0, y), place(x, 0)
        parts += [
            f'<path d="M{offset + LEFT} {row:.1f}H{offset + WIDTH - RIGHT}" stroke="#d3d9e0"/>',
            f'<text x="{offset + LEFT - 6}" y="{row + 4:.1f}" text-anchor="end">{y:.3g}</text>',
            f'<text x="{column:.1f}" y="{base + 16:.1f}" text-anchor="middle">{escape(name_x(x))}</text>',
        ]
    for index, (name, color, line) in enumerate(lines):
        legend = offset + WIDTH - RIGHT - 60 * index
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        parts += [
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>',
            f'<text x="{legend}" y="{24 + TOP - 14}" text-anchor="end" fill="{color}">{escape(name)}</text>',
        ]
    return parts
