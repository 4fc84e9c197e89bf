"""Draws records of `benchmarks.cpu`: a row of panels for each record, a panel for each workload, a bar for each engine.

python -m benchmarks.cpu_picture PICTURE.png benchmarks/results/cpu-S-float32-plain-*.json [RECORD.json ...]
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# An engine has the same colour in every panel, whatever its format.
COLORS = {
    "jaxvllm": "#4269d0",
    "OpenVINO": "#efb118",
    "llama.cpp": "#3ca951",
    "vLLM": "#ff725c",
    "transformers": "#9498a0",
}


def panels(record: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Returns the results of each workload, in the order of the record."""
    found: dict[str, list[dict[str, Any]]] = {}
    for result in record["results"]:
        found.setdefault(result["workload"]["name"], []).append(result)
    return found


def figure_of(result: Mapping[str, Any]) -> str:
    """Returns the key of the figure that counts: the first token where there is no other."""
    return "first_token_ms" if set(result["workload"]["output_tokens"]) == {1} else "tokens_per_second"


def bound_of(record: Mapping[str, Any], workload: str, figure: str) -> float | None:
    """Returns the best that the machine allows, or None where the record has none."""
    bound = record["roofline"].get(workload)
    if bound is None:
        return None
    return 1000 * float(bound["first_token_seconds"]) if figure == "first_token_ms" else float(bound[figure])


def draw(paths: Sequence[Path], picture: Path) -> None:
    """Writes medians as bars and ranges as lines on them; a dashed line is what the machine allows."""
    # Without pyplot, no display is needed and no global state is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    columns = max(len(panels(record)) for record in records)
    figure = Figure(figsize=(4 * columns, 0.6 + 3.1 * len(records)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subfigures(len(records), 1, squeeze=False)[:, 0]
    for row, record, path in zip(rows, records, paths, strict=True):
        axes = row.subplots(1, columns, squeeze=False)[0]
        for one, (workload, results) in zip(axes, panels(record).items(), strict=False):
            _draw_panel(one, record, workload, results)
        for one in axes[len(panels(record)) :]:
            one.set_axis_off()
        what = f"model {record['model_name']}, {record['dtype']}, {record['weights']} weights"
        count = len(record["results"][0]["tokens_per_second"])
        rounds = f"{count} round{'s' if count > 1 else ''}"
        row.suptitle(f"{what}: {record['device']['cpu']}, {record['threads']} threads, {rounds} ({path.stem})")
    figure.savefig(picture, dpi=120)


def _draw_panel(axes: Any, record: Mapping[str, Any], workload: str, results: Sequence[Mapping[str, Any]]) -> None:
    figure = figure_of(results[0])
    for place, result in enumerate(results):
        values, median = result[figure], result[f"{figure}_median"]
        color = next((color for name, color in COLORS.items() if result["engine"].startswith(name)), "#6b7280")
        axes.barh(place, median, color=color, xerr=[[median - min(values)], [max(values) - median]], ecolor="#374151")
        axes.annotate(f" {median:,.0f}", (max(values), place), va="center", fontsize=9, weight="bold")
    if (bound := bound_of(record, workload, figure)) is not None:
        axes.axvline(bound, linestyle="--", color="#374151", linewidth=1)
    axes.set_yticks(range(len(results)), [result["engine"] for result in results])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(max(result[figure]) for result in results))
    axes.set_title(workload, fontsize=10)
    axes.set_xlabel("ms to the first token: less is better" if figure == "first_token_ms" else "output tokens a second")
    axes.grid(axis="x", alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("records", type=Path, nargs="+")
    args = parser.parse_args()
    draw(args.records, args.picture)


if __name__ == "__main__":
    main()
