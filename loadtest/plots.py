"""Draws what `loadtest.compare --curves` measured: throughput against callers, latency against rate.

.venv/bin/python -m loadtest.plots loadtest-results/compare.json
"""

import argparse
from pathlib import Path
from statistics import median

import matplotlib as mpl
import matplotlib.pyplot as plt
import msgspec
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from loadtest.compare import Kind, Result, Round

_COLORS = {
    "direct": "#9a9a9a",
    "nginx": "#5b8c5a",
    "sglang-router": "#c77d3c",
    "vllm-router": "#8268a8",
    "gateway": "#1f5fbf",
    "litellm": "#b5403a",
}


def curve(rounds: list[Round], contender: str, kind: Kind, field: str) -> tuple[list[int], list[float]]:
    """Loads in order, and the median of a sample's field at each."""
    found: dict[int, list[float]] = {}
    for one in rounds:
        if (one.contender, one.kind) == (contender, kind):
            found.setdefault(one.load, []).append(getattr(one.sample, field))
    loads = sorted(found)
    return loads, [median(found[load]) for load in loads]


def _draw(axes: Axes, result: Result, kind: Kind, field: str) -> None:
    for name in dict.fromkeys(one.contender for one in result.rounds):
        loads, values = curve(result.rounds, name, kind, field)
        if not loads:
            continue
        weight = 2.4 if name == "gateway" else 1.3
        axes.plot(loads, values, marker="o", ms=3.5, lw=weight, color=_COLORS.get(name), label=name)
    axes.grid(visible=True, which="both", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    axes.set_xscale("log", base=2 if kind == "callers" else 10)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        # Numbers as people say them, not as powers.
        axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))


def draw(result: Result, folder: Path) -> list[Path]:
    """One picture a question."""
    pictures = (
        ("throughput", "callers", "per_s", "callers, one call at a time each", "requests/s"),
        ("latency", "rate", "p99_ms", "arrivals a second (Poisson)", "p99 from the intended start, ms"),
        ("latency-p50", "rate", "p50_ms", "arrivals a second (Poisson)", "p50 from the intended start, ms"),
    )
    written = []
    for name, kind, field, across, up in pictures:
        figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
        _draw(axes, result, msgspec.convert(kind, Kind), field)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.set_title("single texts, 1,024 dimensions, base64; measured server on one core", fontsize=9)
        written.append(folder / f"compare-{name}.svg")
        figure.savefig(written[-1])
        figure.savefig(written[-1].with_suffix(".png"), dpi=150)
        plt.close(figure)
    return written


def main() -> None:
    """Beside the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    path = parser.parse_args().result
    mpl.use("svg")
    for written in draw(msgspec.json.decode(path.read_bytes(), type=Result), path.parent):
        print(written)


if __name__ == "__main__":
    main()
