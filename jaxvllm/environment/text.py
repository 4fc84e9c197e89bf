"""Writes the report of `jaxvllm env` as text for an issue."""

from collections.abc import Iterator
from typing import Any

GIB, MIB = 2**30, 2**20


def text(report: dict[str, Any]) -> str:
    """Returns the report as lines, each with its subject in the first column."""
    return "\n".join(f"{subject:<12}{fact}".rstrip() for subject, fact in _lines(report))


def _lines(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    ours, python, system, cpu = (report[name] for name in ("jaxvllm", "python", "system", "cpu"))
    commit = f", commit {ours['commit']}" if ours["commit"] else ""
    yield "jaxvllm", f"{ours['version']}{commit}, in {ours['location']}"
    yield "Python", f"{python['version']} ({python['implementation']}), {python['executable']}"
    yield "system", ", ".join(filter(None, (system["platform"], system["distribution"])))
    yield "CPU", f"{cpu['model']}, {cpu['architecture']}, {cpu['usable_cores']} of {cpu['cores']} cores usable"
    yield "", " ".join(cpu["features"]) or "none of the vector instructions that the kernels use is known"
    yield "memory", _memory(report["memory"])
    for gpu in report["nvidia"]:
        capability = f"capability {gpu['compute_capability']}"
        yield "NVIDIA", f"{gpu['name']}, {gpu['memory']}, {capability}, driver {gpu['driver']}"
    yield from _devices(report["devices"])
    installed = [f"{name} {version}" for name, version in report["packages"].items() if version]
    for start in range(0, len(installed), 5):
        yield "" if start else "packages", ", ".join(installed[start : start + 5])
    missing = [name for name, version in report["packages"].items() if not version]
    yield "", f"not installed: {', '.join(missing)}" if missing else ""
    for index, (name, value) in enumerate(report["variables"].items()):
        yield "" if index else "variables", f"{name}={value}"
    for index, cache in enumerate(report["caches"]):
        size = f"{cache['bytes'] / MIB:,.1f} MiB in {cache['files']} files" if cache["files"] else "empty"
        yield "" if index else "programs", f"{cache['directory']}: {size}"


def _memory(memory: dict[str, int | None]) -> str:
    names = {"total_bytes": "in all", "available_bytes": "available", "limit_bytes": "allowed to this container"}
    known = [f"{size / GIB:.1f} GiB {names[name]}" for name, size in memory.items() if size is not None]
    return ", ".join(known) or "unknown"


def _devices(devices: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "error" in devices:
        yield "devices", f"none: {devices['error']}"
        return
    memory = f", {devices['memory_bytes'] / GIB:.1f} GiB each for jax" if devices["memory_bytes"] else ""
    chip = f" (known as {devices['chip']})" if devices["chip"] else ""
    processes = f" in {devices['processes']} processes" if devices["processes"] > 1 else ""
    yield "devices", f"{devices['count']} x {devices['kind']}{chip}, {devices['platform']}{memory}{processes}"
    if devices["driver"] != devices["platform"]:  # a CPU has none
        yield "", devices["driver"]
    for index, (dtype, choice) in enumerate(devices["attention"].items()):
        chip = f" for {choice['chip']}" if choice["chip"] else ""
        why = f" ({choice['why']})" if choice["why"] else ""
        yield "" if index else "attention", f"{dtype}: {choice['backend']}{chip}{why}"
