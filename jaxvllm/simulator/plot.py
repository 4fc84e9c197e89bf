"""Draws a simulation over its virtual time. It needs matplotlib, from the extra `plot`."""

from pathlib import Path

import numpy as np

from jaxvllm.simulator.simulation import SimulationResult

_COLORS = ("#4269d0", "#efb118", "#3ca951", "#ff725c")
_POINTS = 20_000  # of a cloud; more of them hide each other


def draw_simulation(result: SimulationResult, title: str, path: Path) -> None:
    """Writes three panels over the seconds of the run: KV pages in use, requests, and the time to first token."""
    # Without pyplot, no display is needed and no global state is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    FigureCanvasAgg(figure)
    pages, requests, latency = figure.subplots(3, 1, sharex=True)
    for pool, color, pale in zip(result.pools, _COLORS, _COLORS[2:], strict=False):
        samples = pool.timeline.samples
        times = [load.at for load in samples]
        pages.plot(times, [100 * load.kv_share for load in samples], color=color, linewidth=1, label=pool.name)
        requests.plot(
            times, [load.num_running for load in samples], color=color, linewidth=1, label=f"{pool.name}: run"
        )
        waiting = [load.num_waiting for load in samples]
        requests.plot(times, waiting, color=pale, linewidth=1, label=f"{pool.name}: wait")
    arrivals, ttfts = result.ledger.ttfts()
    shown = slice(None, None, max(len(arrivals) // _POINTS, 1))
    latency.scatter(arrivals[shown], 1000 * np.maximum(ttfts[shown], 1e-6), s=3, color=_COLORS[0], linewidths=0)
    latency.set_yscale("log")
    pages.set_ylabel("KV pages in use, %")
    pages.set_ylim(0, 105)
    requests.set_ylabel("requests")
    latency.set_ylabel("time to first token, ms")
    latency.set_xlabel("seconds of virtual time")
    for axes in (pages, requests):
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in (pages, requests, latency):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
