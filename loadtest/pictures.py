"""Pictures of measured curves: throughput by callers and latency by rate."""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import msgspec
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from loadtest.results import Curve, RunResult

_COLORS = {
    "direct": "#8a8a8a",
    "nginx": "#5b8c5a",
    "sglang-router": "#c77d3c",
    "vllm-router": "#8268a8",
    "gateway": "#1f5fbf",
    "litellm": "#b5403a",
}
_OTHER_COLOR = "#444444"
_LATENCY = "ms, from the arrival time of a call"
_RATES = "calls per second, random arrivals; a line ends where the server did not keep up"


class Picture(msgspec.Struct, frozen=True):
    """All curves of one name on one pair of axes."""

    file: str
    curve: str
    title: str
    x_label: str
    y_label: str


PICTURES = (
    Picture(
        "throughput", "requests/s by callers", "Calls per second by callers", "callers", "calls per second"
    ),
    Picture("latency", "p99 ms by rate", "99th percentile of latency by rate", _RATES, _LATENCY),
    Picture("latency-p50", "p50 ms by rate", "Median latency by rate", _RATES, _LATENCY),
)


def draw(result: RunResult, folder: Path) -> list[Path]:
    """Draw all pictures that the result has curves for, as SVG and PNG; return the SVGs' paths."""
    mpl.use("svg")
    paths = []
    for picture in PICTURES:
        curves = [curve for curve in result.curves if curve.name == picture.curve]
        if curves:
            figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
            axes.set(title=picture.title, xlabel=picture.x_label, ylabel=picture.y_label)
            axes.grid(visible=True, axis="y", color="#e8e8e8")
            axes.spines[["top", "right", "left"]].set_visible(False)
            for curve in curves:
                _draw_curve(axes, curve)
            axes.set(xscale="log", yscale="log")
            for axis in (axes.xaxis, axes.yaxis):
                # Plain numbers instead of powers of ten.
                axis.set_major_locator(LogLocator(10, (1, 2, 5)))
                axis.set_minor_locator(NullLocator())
                axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
            axes.legend(frameon=False)
            paths.append(folder / f"{result.run}-{picture.file}.svg")
            figure.savefig(paths[-1])
            figure.savefig(paths[-1].with_suffix(".png"), dpi=150)
            plt.close(figure)
    return paths


def _draw_curve(axes: Axes, curve: Curve) -> None:
    """Draw the medians as a line, and a band from the least to the greatest values."""
    color, width = _COLORS.get(curve.subject, _OTHER_COLOR), 2.6 if curve.subject == "gateway" else 1.4
    axes.plot(curve.x, [point.median for point in curve.y], lw=width, color=color, label=curve.subject)
    lows, highs = [point.min for point in curve.y], [point.max for point in curve.y]
    axes.fill_between(curve.x, lows, highs, color=color, alpha=0.15, lw=0)
