"""The cost of stages: the planner's answer for one model, on the same eight chips as one stage and as two.

    python -m benchmarks.stages [--record]

It needs the environment .aot, which has the compilers, and no device.
"""

import argparse
import json
import os
import subprocess
from typing import Any

from benchmarks.result_files import ROOT, machine, write_record
from tools.aot import AOT, compiler_versions

MODEL, DEVICE = "Llama-3.1-70B", "v6e"
MESHES = ("1x8", "2x1x4")
HEADER = (
    "| mesh | weights, GiB | KV tokens | decode 1, ms | decode 64, ms | prefill 2048, ms | sent to the next stage |"
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the plans to benchmarks/results")
    arguments = parser.parse_args()
    about, plans = machine(), {}
    print(f"{MODEL} on eight {DEVICE}\n\n{HEADER}\n|{'---|' * (HEADER.count('|') - 1)}", flush=True)
    for mesh in MESHES:
        plans[mesh] = plan(mesh)
        print(row(mesh, plans[mesh]), flush=True)
    if arguments.record:
        print(write_record("stages", about, {"plans": plans, "versions": compiler_versions()}))


def plan(mesh: str) -> dict[str, Any]:
    """Returns the plan as `jaxvllm plan --json` prints it."""
    command = [
        str(AOT / "bin" / "python"),
        "-m",
        "jaxvllm",
        "plan",
        MODEL,
        "--device",
        DEVICE,
        "--mesh",
        mesh,
        "--json",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row(mesh: str, plan: dict[str, Any]) -> str:
    floors = {floor["num_tokens"]: floor["seconds"] * 1e3 for floor in plan["decode"]}
    sent = [
        f"{one['count']} x {one['num_bytes'] / 2**20:.0f} MiB"
        for one in plan["findings"]["largest"]["collectives"]
        if one["kind"] == "collective-permute"
    ]
    memory = plan["memory"]
    cells = [mesh, f"{memory['weights'] / 2**30:.2f}", f"{memory['num_tokens']:,}"]
    cells += [f"{floors[1]:.1f}", f"{floors[64]:.1f}", f"{plan['prefill']['seconds'] * 1e3:.1f}", ", ".join(sent)]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
