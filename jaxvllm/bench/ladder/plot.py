"""Draws the ladder: a row for each rung, a panel for each figure. It needs matplotlib, from the extra `plot`."""

import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxvllm.bench.ladder.figures import FIGURES, Change, Figure, Verdict
from jaxvllm.bench.ladder.measure import Ladder
from jaxvllm.bench.ladder.report import heading, slow
from pallas_kernels.extras import install_command

_COLORS = {Verdict.BETTER: "#2e8b57", Verdict.WORSE: "#d1495b", Verdict.SAME: "#9aa5b1", None: "#5b7083"}
_QUIET = "#6b7280"
# A bar that would be so many times as long as the next one is cut, or the others could not be told apart.
_CUT = 3.0
_INCHES_OF_ROW = 1.05
_INCHES_OF_HEAD = 1.75
_INCHES_OF_FOOT = 0.25
_PANEL = 1.75  # the width of a panel, where that of the column with the ideas is 6
_LEFT = 0.012
_WRAP = {"idea": 88, "limits": 100}  # characters of a line


def check_plot(path: Path) -> None:
    """Raises ValueError when a picture cannot be written to `path`. Call it before the measurement."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"--output needs matplotlib, which is not installed: {install_command('plot')}")
    if path.suffix != ".png" or not path.parent.is_dir():
        raise ValueError(f"--output {path} must be a .png file in a directory that exists")


def draw_ladder(ladder: Ladder, path: Path) -> None:
    """Writes the picture. A colour says what a rung changed; its figure and the factor stand after the bar."""
    # This way needs no display and leaves no state in pyplot behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    num_rungs = len(ladder.rungs)
    height = _INCHES_OF_HEAD + _INCHES_OF_ROW * num_rungs + _INCHES_OF_FOOT
    canvas = Canvas(figsize=(22, height))
    FigureCanvasAgg(canvas)
    grid = canvas.add_gridspec(
        1,
        1 + len(FIGURES),
        width_ratios=[6, *[_PANEL] * len(FIGURES)],
        left=_LEFT,
        right=1 - _LEFT / 2,
        top=1 - _INCHES_OF_HEAD / height,
        bottom=_INCHES_OF_FOOT / height,
        wspace=0.06,
    )
    axes = [canvas.add_subplot(grid[0, column]) for column in range(1 + len(FIGURES))]
    for one in axes:
        one.set_ylim(num_rungs - 0.5, -0.5)
        one.set_axis_off()
        for row in range(0, num_rungs, 2):
            one.axhspan(row - 0.5, row + 0.5, color="#f4f6f8", zorder=0)
    _write_head(canvas, ladder, height)
    _write_ideas(axes[0], ladder)
    for one, figure in zip(axes[1:], FIGURES, strict=True):
        _draw_bars(one, ladder, figure)
    canvas.savefig(path, dpi=100)


def _write_head(canvas: Any, ladder: Ladder, height: float) -> None:
    def write(x: float, inches: float, text: str, **style: Any) -> None:
        canvas.text(x, 1 - inches / height, text, va="center", **style)

    write(_LEFT, 0.32, "The ladder: what each idea of LLM serving buys", fontsize=19, weight="bold")
    write(_LEFT, 0.68, heading(ladder), fontsize=12)
    legend: tuple[tuple[float, str, Verdict | None], ...] = (
        (0.0, "Beside the rung above:", None),
        (0.115, "green is better,", Verdict.BETTER),
        (0.19, "red is worse,", Verdict.WORSE),
        (0.25, "grey ≈ is no difference that these runs can tell", Verdict.SAME),
    )
    for x, text, verdict in legend:
        write(_LEFT + x, 0.99, text, fontsize=12, color=_COLORS[verdict], weight="bold")


def _write_ideas(axes: Any, ladder: Ladder) -> None:
    axes.set_xlim(0, 1)
    few = dict(slow(ladder))
    for row, measured in enumerate(ladder.rungs):
        rung = measured.rung
        axes.text(0.04, row - 0.27, f"{row + 1}", fontsize=13, weight="bold", va="center", ha="right", color=_QUIET)
        axes.text(0.055, row - 0.27, rung.title, fontsize=13, weight="bold", va="center")
        axes.text(0.985, row - 0.27, rung.source, fontsize=10, va="center", ha="right", color=_QUIET)
        idea = textwrap.fill(rung.idea, _WRAP["idea"])
        limits = textwrap.fill(few.get(rung.name, ""), _WRAP["limits"])
        axes.text(0.055, row - 0.08, idea, fontsize=11, va="top")
        below = row + 0.14 + 0.17 * idea.count("\n")
        axes.text(0.055, below, limits, fontsize=9.5, va="top", color=_QUIET, style="italic")


def _draw_bars(axes: Any, ladder: Ladder, figure: Figure) -> None:
    values = [measured.value(figure) for measured in ladder.rungs]
    longest = bar_limit([value for value in values if value is not None])
    axes.set_xlim(0, longest * 1.75)
    for row, (measured, value) in enumerate(zip(ladder.rungs, values, strict=True)):
        change: Change | None = measured.change(ladder.rungs[row - 1], figure) if row else None
        color = _COLORS[None if change is None else change.verdict]
        if value is None:
            axes.text(0, row, "none is kept", fontsize=10.5, va="center", color=_QUIET)
            continue
        shown = min(value, longest)
        axes.barh(row, shown, height=0.5, color=color, zorder=2)
        if value > longest:  # two white strokes: it goes on
            for at in (0.88, 0.94):
                stroke = [at * longest, (at + 0.03) * longest]
                axes.plot(stroke, [row + 0.3, row - 0.3], color="white", linewidth=2.5, zorder=3)
        label = f" {figure.text(value)}"
        axes.text(shown, row - (0.13 if change else 0), label, fontsize=10.5, va="center", zorder=4)
        if change is not None:
            style = dict(fontsize=12, va="center", color=color, weight="bold", zorder=4)
            axes.text(shown, row + 0.17, f" {change.text}", **style)
    axes.text(0, -0.8, figure.label, fontsize=12, weight="bold", va="center")
    better = "more is better" if figure.is_better_high else "less is better"
    axes.text(0, -0.62, better, fontsize=10, va="center", color=_QUIET)


def bar_limit(values: Sequence[float]) -> float:
    """Returns the value up to which bars are drawn: all of the longest, unless the others would be lost beside it."""
    if not values or max(values) <= 0:
        return 1.0
    *others, longest = sorted(values)
    if others and 0 < _CUT * others[-1] < longest:
        return 1.25 * others[-1]
    return longest
