"""A bar chart as SVG, for reports: no library is worth its weight for this."""

from collections.abc import Sequence
from html import escape

ROW, LABEL, WIDTH = 26, 230, 420


def bars(title: str, rows: Sequence[tuple[str, float]]) -> str:
    """One horizontal bar for each (name, value), the longest as wide as the chart."""
    most = max(value for _, value in rows)
    height = ROW * (len(rows) + 1) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + WIDTH + 70}" height="{height}">',
        "<style>text { font: 13px sans-serif }</style>",
        f'<text x="8" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    for index, (name, value) in enumerate(rows, start=1):
        y, width = index * ROW + 4, max(1.0, value / most * WIDTH)
        parts += [
            f'<text x="8" y="{y + 15}">{escape(name)}</text>',
            f'<rect x="{LABEL}" y="{y}" width="{width:.0f}" height="{ROW - 6}" fill="#4878a8"/>',
            f'<text x="{LABEL + width + 6:.0f}" y="{y + 15}">{value:,.0f}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
