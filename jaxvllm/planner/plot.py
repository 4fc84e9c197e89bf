"""Draws the memory of each device. This needs matplotlib, which the extra `plot` installs."""

from importlib.util import find_spec
from pathlib import Path

from jaxvllm.planner.capacity_plan import CapacityPlan
from pallas_kernels.extras import install_command

GIB = 2**30
_COLORS = {"weights": "#4269d0", "step": "#efb118", "KV": "#3ca951", "unused": "#d9d9d9"}


def check_plot(path: Path) -> None:
    """Raises ValueError when a picture cannot be written to `path`, before a minute of compiling and not after it."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"--plot needs matplotlib, which is not installed: {install_command('plot')}")
    if path.suffix != ".png" or not path.parent.is_dir():
        raise ValueError(f"--plot {path} must be a .png file in a directory that exists")


def draw_memory(plan: CapacityPlan, path: Path) -> None:
    """Writes a stacked bar for each device of a replica, GiB: weights, the largest step, KV pages, unused."""
    # This way needs no display and leaves no state in pyplot behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    memory = plan.memory
    parts = {"weights": memory.weights, "step": memory.step, "KV": memory.kv, "unused": max(memory.unused, 0)}
    devices = [str(device) for device in range(plan.mesh.model)]
    figure = Figure(figsize=(3 + 0.6 * len(devices), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bottom = 0.0
    for name, num_bytes in parts.items():
        height = num_bytes / GIB
        axes.bar(devices, [height] * len(devices), bottom=bottom, color=_COLORS[name], label=f"{name} {height:.2f}")
        bottom += height
    axes.axhline(memory.total / GIB, color="black", linewidth=1)
    axes.set_ylabel("GiB")
    axes.set_xlabel("device of a replica")
    axes.set_title(f"{plan.model} on {plan.mesh} {plan.device}")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=120)
