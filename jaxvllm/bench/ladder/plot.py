"""Draws the ladder: a row for each rung, a panel for each figure. It needs matplotlib, from the extra `plot`."""

import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxvllm.bench.ladder.figures import FIGURES, Change, Figure, Verdict
from jaxvllm.bench.ladder.measure import Ladder
from jaxvllm.bench.ladder.report import heading, slow

_COLORS = {Verdict.BETTER: "#2e8b57", Verdict.WORSE: "#d1495b", Verdict.SAME: "#9aa5b1", None: "#4269d0"}
# A bar this many times as long as the next one is cut, or the others could not be told apart.
_CUT = 3.0
_TEXT_WIDTH = 4.6  # of the column with the ideas, in widths of a panel's


def check_plot(path: Path) -> None:
    """Raises ValueError when a picture cannot be written to `path`. Call it before the measurement."""
    if find_spec("matplotlib") is None:
        raise ValueError("--output needs matplotlib, which is not installed: pip install jaxvllm[plot]")
    if path.suffix != ".png" or not path.parent.is_dir():
        raise ValueError(f"--output {path} must be a .png file in a directory that exists")


def draw_ladder(ladder: Ladder, path: Path) -> None:
    """Writes the picture. A colour says what a rung changed; its figure and the factor stand behind the bar."""
    # This way needs no display and leaves no state in pyplot behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    num_rungs = len(ladder.rungs)
    canvas = Canvas(figsize=(22, 2.1 + 0.92 * num_rungs))
    FigureCanvasAgg(canvas)
    height = 2.1 + 0.92 * num_rungs
    grid = canvas.add_gridspec(
        1,
        1 + len(FIGURES),
        width_ratios=[_TEXT_WIDTH, *[1.75] * len(FIGURES)],
        left=0.012,
        right=0.995,
        top=1 - 1.5 / height,
        bottom=0.35 / height,
        wspace=0.1,
    )
    axes = [canvas.add_subplot(place) for place in grid]
    for one in axes:
        one.set_ylim(num_rungs - 0.5, -0.5)
        one.set_axis_off()
        for row in range(0, num_rungs, 2):
            one.axhspan(row - 0.5, row + 0.5, color="#f4f6f8", zorder=0)
    _write_ideas(axes[0], ladder)
    for one, figure in zip(axes[1:], FIGURES, strict=True):
        _draw_bars(one, ladder, figure)
    canvas.text(0.012, 1 - 0.32 / height, "The ladder: what each idea of LLM serving buys", fontsize=19, weight="bold", va="center")
    canvas.text(0.012, 1 - 0.68 / height, f"{heading(ladder)}.", fontsize=11.5, va="center", color="#333333")
    legend = (
        ("green: better than the rung above", Verdict.BETTER),
        ("red: worse", Verdict.WORSE),
        ("grey ≈: no difference that these runs can tell", Verdict.SAME),
    )
    at = 0.012
    for text, verdict in legend:
        canvas.text(at, 1 - 1.0 / height, text, fontsize=11.5, va="center", color=_COLORS[verdict], weight="bold")
        at += 0.0062 * len(text)
    canvas.savefig(path, dpi=100)


def _write_ideas(axes: Any, ladder: Ladder) -> None:
    axes.set_xlim(0, 1)
    few = dict(slow(ladder))
    for row, measured in enumerate(ladder.rungs):
        rung = measured.rung
        axes.text(0.012, row - 0.28, f"{row + 1}  {rung.title}", fontsize=13, weight="bold", va="center")
        axes.text(0.99, row - 0.28, rung.source, fontsize=9.5, va="center", ha="right", color="#777777")
        text = "\n".join(textwrap.wrap(rung.idea, 92))
        axes.text(0.037, row - 0.02, text, fontsize=10.5, va="center")
        if rung.name in few:
            why = "\n".join(textwrap.wrap(few[rung.name], 108))
            axes.text(0.037, row + 0.26, why, fontsize=9.5, va="center", color="#777777", style="italic")


def _draw_bars(axes: Any, ladder: Ladder, figure: Figure) -> None:
    values = [measured.value(figure) for measured in ladder.rungs]
    longest = bar_limit([value for value in values if value is not None])
    axes.set_xlim(0, longest * 1.75)
    for row, (measured, value) in enumerate(zip(ladder.rungs, values, strict=True)):
        change: Change | None = measured.change(ladder.rungs[row - 1], figure) if row else None
        color = _COLORS[None if change is None else change.verdict]
        if value is None:
            axes.text(0, row, "keeps none", fontsize=10.5, va="center", color="#777777")
            continue
        shown = min(value, longest)
        axes.barh(row, shown, height=0.5, color=color, zorder=2)
        if value > longest:  # two white strokes: it goes on
            for at in (0.90, 0.94):
                axes.plot([at * longest, (at + 0.03) * longest], [row + 0.3, row - 0.3], color="white", linewidth=2.5, zorder=3)
        label = f" {figure.text(value)}"
        axes.text(shown, row - (0.13 if change else 0), label, fontsize=10.5, va="center", zorder=4)
        if change is not None:
            axes.text(shown, row + 0.17, f" {change.text}", fontsize=11, va="center", color=color, weight="bold", zorder=4)
    better = "more is better" if figure.is_better_high else "less is better"
    axes.text(0, -0.78, figure.label, fontsize=12, weight="bold", va="center")
    axes.text(0, -0.58, better, fontsize=9.5, va="center", color="#777777")


def bar_limit(values: Sequence[float]) -> float:
    """Returns the value up to which bars are drawn: all of the longest, unless the others would be lost beside it."""
    if not values or max(values) <= 0:
        return 1.0
    *others, longest = sorted(values)
    if others and 0 < _CUT * others[-1] < longest:
        return 1.25 * others[-1]
    return longest
