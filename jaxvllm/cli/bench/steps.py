"""`jaxvllm bench steps`: measures how long the steps of an engine take, for `jaxvllm simulate --table`."""

import argparse
from pathlib import Path

from jaxvllm.cli.bench.result import check_output
from jaxvllm.cli.flags import add_flags as add_flags_of
from jaxvllm.cli.flags import given, real
from jaxvllm.cli.parser import ENGINE_EPILOG
from jaxvllm.config import EngineConfig

# Drafts have no place in a table: whether they are right depends on the text.
ENGINE_DEFAULTS = {"speculation": False, "warm_up": "full"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ENGINE_EPILOG
    parser.add_argument("--seconds", type=real(0, 1e6), default=60.0, metavar="S", help="time to measure (default: 60)")
    parser.add_argument("--output-json", type=Path, required=True, metavar="FILE.json", help="the table to write")
    add_flags_of(parser, EngineConfig, "engine", defaults=ENGINE_DEFAULTS)


def run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from jaxvllm.bench.offline.origin import origin
    from jaxvllm.engine.burst_pace import SERVING_SECONDS
    from jaxvllm.engine.engine import Engine
    from jaxvllm.simulator.measuring import StepMeasurement, device_name, measure_steps

    config = EngineConfig.from_options(**(ENGINE_DEFAULTS | given(args, EngineConfig)))
    check_output(args.output_json)
    if config.has_others:
        raise ValueError("steps are measured by one process")
    engine = Engine(config, SERVING_SECONDS)
    measured = StepMeasurement()
    try:
        measure_steps(engine, args.seconds, measured)
    finally:
        engine.close()
    table = measured.table(config.model, device_name())
    args.output_json.write_text(replace(table, origin=origin()).to_json(), encoding="utf-8")
    print(f"written to {args.output_json}: try jaxvllm simulate --table {args.output_json}")
    return 0
