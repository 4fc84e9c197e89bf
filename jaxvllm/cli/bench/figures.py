"""The flags that choose which latencies of a load are shown, for commands that measure one and that simulate one."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from jaxvllm.bench.summary import Goodput


def add_figure_flags(parser: argparse.ArgumentParser, metrics: str = "ttft,tpot,itl", percentiles: str = "99") -> None:
    """Adds vLLM's flags of figures, with these defaults."""
    from jaxvllm.bench.summary import LATENCIES

    figures = parser.add_argument_group("figures")
    figures.add_argument(
        "--percentile-metrics",
        default=metrics,
        metavar="NAMES",
        help=f"of {','.join(LATENCIES)} (default: %(default)s)",
    )
    figures.add_argument(
        "--metric-percentiles", default=percentiles, metavar="NUMBERS", help="such as 50,90,99 (default: %(default)s)"
    )
    figures.add_argument(
        "--goodput", nargs="+", metavar="NAME:MS", help="count requests within all limits, such as ttft:100 tpot:50"
    )


@dataclass(frozen=True)
class Figures:
    """The latencies that are shown, their percentiles, and the limits that a good request keeps."""

    names: Sequence[str]
    percentiles: Sequence[float]
    goodput: "Goodput | None"

    @classmethod
    def of_flags(cls, args: argparse.Namespace) -> Self:
        """Raises ValueError for a name, number or limit that is none."""
        from jaxvllm.bench.summary import Goodput

        goodput = Goodput.parse(args.goodput) if args.goodput else None
        return cls(_names(args.percentile_metrics), _percentiles(args.metric_percentiles), goodput)


def _names(text: str) -> list[str]:
    from jaxvllm.bench.summary import LATENCIES

    wanted = text.split(",")
    if unknown := [name for name in wanted if name not in LATENCIES]:
        raise ValueError(f"--percentile-metrics takes {','.join(LATENCIES)}, not {unknown[0]}")
    return [name for name in LATENCIES if name in wanted]


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise ValueError(f"--metric-percentiles takes numbers from 0 to 100, such as 50,99, not {text}")
    return values
