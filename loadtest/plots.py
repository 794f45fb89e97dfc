"""Draws what was measured: throughput against callers, latency against rate; and a worker's memory.

.venv/bin/python -m loadtest.plots loadtest-results/compare.json [loadtest-results/endurance.json]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib as mpl
import matplotlib.pyplot as plt
import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, StrMethodFormatter

from loadtest.compare import Kind, Result, Round
from loadtest.endurance import Result as Endured

_COLORS = {
    "direct": "#8a8a8a",
    "nginx": "#5b8c5a",
    "sglang-router": "#c77d3c",
    "vllm-router": "#8268a8",
    "gateway": "#1f5fbf",
    "litellm": "#b5403a",
}
_NAMES = {"direct": "no gateway at all", "gateway": "this gateway", "litellm": "LiteLLM"}
_SHAPE = "one text a call, 1,024 dimensions as base64; the measured server has one core"
# Room between two names, in points.
_APART = 11.0


class Curve(msgspec.Struct, frozen=True):
    """Loads in order, and of a sample's field at each the median, the least and the most."""

    loads: list[int]
    middle: list[float]
    least: list[float]
    most: list[float]


class Picture(msgspec.Struct, frozen=True):
    """What is drawn: a field of the samples of one kind of load."""

    name: str
    kind: Kind
    field: str
    title: str
    across: str
    up: str


PICTURES = (
    Picture(
        "throughput",
        "callers",
        "per_s",
        "Calls a second, by how many callers there are",
        "callers, each with one call at a time",
        "calls a second",
    ),
    Picture(
        "latency",
        "rate",
        "p99_ms",
        "The slowest call of a hundred, by how many arrive",
        "calls that arrive in a second, at random; a line ends where the server did not keep up",
        "ms, 99th percentile, from the moment a call was due",
    ),
    Picture(
        "latency-p50",
        "rate",
        "p50_ms",
        "The middle call, by how many arrive",
        "calls that arrive in a second, at random; a line ends where the server did not keep up",
        "ms, median, from the moment a call was due",
    ),
)


def curve(rounds: Sequence[Round], contender: str, kind: Kind, field: str) -> Curve:
    """Over the repeats."""
    found: dict[int, list[float]] = {}
    for one in rounds:
        if (one.contender, one.kind) == (contender, kind):
            found.setdefault(one.load, []).append(getattr(one.sample, field))
    ordered = dict(sorted(found.items()))
    told = ordered.values()
    return Curve(
        list(ordered), [median(one) for one in told], [min(one) for one in told], [max(one) for one in told]
    )


def _draw(axes: Axes, result: Result, picture: Picture) -> None:
    ends: list[tuple[float, float, str]] = []
    for name in dict.fromkeys(one.contender for one in result.rounds):
        told = curve(result.rounds, name, picture.kind, picture.field)
        if not told.loads:
            continue
        ours, color = name == "gateway", _COLORS.get(name, "#444444")
        axes.plot(told.loads, told.middle, marker="o", ms=4, lw=2.6 if ours else 1.4, color=color)
        axes.fill_between(told.loads, told.least, told.most, color=color, alpha=0.15, lw=0)
        ends.append((told.loads[-1], told.middle[-1], name))
    axes.set_xscale("log", base=2 if picture.kind == "callers" else 10)
    axes.set_yscale("log")
    callers = FixedLocator([1, 2, 4, 8, 16, 32, 64, 128])
    axes.xaxis.set_major_locator(callers if picture.kind == "callers" else LogLocator(10, (1, 2, 5)))
    axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        # Numbers as people say them, not as powers.
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    _name(axes, ends)


def _name(axes: Axes, ends: Sequence[tuple[float, float, str]]) -> None:
    """Each line's name where it ends; names that would lie on each other are moved up."""
    points_a_pixel = 72 / axes.figure.dpi
    placed: list[tuple[float, float]] = []
    for x, y, name in sorted(ends, key=lambda one: one[1]):
        across, up = axes.transData.transform((x, y)) * points_a_pixel
        target = max([up, *(there + _APART for beside, there in placed if abs(beside - across) < 6 * _APART)])
        placed.append((across, target))
        axes.annotate(
            _NAMES.get(name, name),
            (x, y),
            (7, target - up),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=_COLORS.get(name, "#444444"),
            fontweight="bold" if name == "gateway" else "normal",
            annotation_clip=False,
        )


def _panel(title: str, told: str, across: str, up: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(8, 4.8))
    figure.subplots_adjust(left=0.1, right=0.84, top=0.86, bottom=0.13)
    figure.text(0.1, 0.94, title, fontsize=12, fontweight="bold")
    figure.text(0.1, 0.895, told, fontsize=8.5, color="#666666")
    axes.set_xlabel(across, fontsize=8.5)
    axes.set_ylabel(up, fontsize=8.5)
    axes.tick_params(labelsize=8, length=0)
    axes.grid(visible=True, axis="y", color="#e8e8e8")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure, axes


def draw(result: Result, folder: Path) -> list[Path]:
    """One picture a question."""
    written = []
    for picture in PICTURES:
        figure, axes = _panel(picture.title, _SHAPE, picture.across, picture.up)
        _draw(axes, result, picture)
        written.append(_write(figure, folder / f"compare-{picture.name}.svg"))
    return written


def draw_endured(result: Endured, folder: Path) -> list[Path]:
    """A worker's memory, from its first calls to its last."""
    slope = result.slopes["RSS, after the warm-up"]
    told = f"{slope.slope:+.2f} ± {slope.within:.2f} MB a million calls (95 %), after the first fifth"
    figure, axes = _panel("Memory of an HTTP worker, by calls answered", told, "calls", "MB")
    calls = [one.calls for one in result.points]
    lines = {
        "resident": ([one.memory.rss_mb for one in result.points], _COLORS["gateway"]),
        "its own alone": ([one.memory.private_mb for one in result.points], _COLORS["direct"]),
    }
    for name, (values, color) in lines.items():
        axes.plot(calls, values, color=color, lw=2)
        axes.annotate(
            name, (calls[-1], values[-1]), (7, 0), textcoords="offset points", color=color, fontsize=8.5
        )
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return [_write(figure, folder / "endurance.svg")]


def _write(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    figure.savefig(path.with_suffix(".png"), dpi=150)
    plt.close(figure)
    return path


def main() -> None:
    """Beside the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    mpl.use("svg")
    for path in parser.parse_args().results:
        raw = path.read_bytes()
        if "points" in msgspec.json.decode(raw):
            written = draw_endured(msgspec.json.decode(raw, type=Endured), path.parent)
        else:
            written = draw(msgspec.json.decode(raw, type=Result), path.parent)
        print(*written, sep="\n")


if __name__ == "__main__":
    main()
