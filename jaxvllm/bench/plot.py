"""Draws latency over throughput. It needs matplotlib, from the extra `plot`."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from jaxvllm.bench.sweep import Point
from pallas_kernels.extras import install_command

_PANELS = {"ttft": "time to first token, ms", "tpot": "time per output token, ms"}
_COLORS = {"median": "#4269d0", "P99": "#efb118"}


def check_plot(path: Path) -> None:
    """Raises ValueError when a picture could not be written to `path`. Call it before the sweep."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"--plot needs matplotlib, which is not installed: {install_command('plot')}")
    if path.suffix not in (".png", ".svg", ".pdf") or not path.parent.is_dir():
        raise ValueError(f"--plot {path} must be a .png, .svg or .pdf file in a directory that exists")


def draw_sweep(points: Sequence[Point], title: str, path: Path) -> None:
    """Writes two panels, TTFT and TPOT over output tokens per second; each point is named by its load."""
    # Without pyplot, no display is needed and no global state is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    throughputs = [point.run.summary.output_throughput for point in points]
    for axes, (name, label) in zip(figure.subplots(1, 2), _PANELS.items(), strict=True):
        latencies = [point.run.summary.latencies[name] for point in points]
        curves = {
            "median": [latency.median for latency in latencies],
            "P99": [latency.percentiles[99.0] for latency in latencies],
        }
        for curve, values in curves.items():
            axes.plot(throughputs, values, marker="o", color=_COLORS[curve], label=curve)
        for point, x, y in zip(points, throughputs, curves["median"], strict=True):
            axes.annotate(point.name, (x, y), xytext=(4, 6), textcoords="offset points", fontsize=8)
        axes.set_xlabel("output tokens per second")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.margins(x=0.15)  # room for the names
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
