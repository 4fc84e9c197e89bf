"""`jaxvllm convert`: writes a checkpoint as an orbax tree, of which each device loads only the parts that it needs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxvllm.cli.parser import Parser
from sharding.mesh import MeshShape

DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Converts and returns the exit code: 0, or 2 with a line on standard error when an option is wrong."""
    args = _parser().parse_args(argv)
    try:
        shape = MeshShape.parse(args.mesh)
        if (copies := shape.num_devices // shape.model) > 1:
            raise ValueError(f"mesh {shape} would hold {copies} copies of the model: give 1x{shape.num_devices}")
        # Imported after parsing, because --help needs no device.
        import jax

        from jaxvllm.model_name import resolve
        from jaxvllm.models.checkpoint import convert
        from sharding.placement import make_mesh

        model = resolve(args.model)
        convert(model, args.output, dtype=args.dtype, mesh=make_mesh(shape, jax.devices()))
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"jaxvllm convert: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"{args.output} holds the model: load it on any mesh with --model {args.output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxvllm convert",
        usage="%(prog)s --model MODEL --output DIR [OPTION ...]",
        description="Write a checkpoint as an orbax tree, split over devices. It needs jaxvllm[orbax], and the whole "
        "model is on the devices meanwhile: on CPU, in the host's memory.",
    )
    parser.add_argument("--model", required=True, help="a directory in Hugging Face format, or a hub name")
    parser.add_argument(
        "--output", required=True, type=Path, metavar="DIR", help="a directory that is empty or does not exist yet"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: what the config states (default: auto)")
    parser.add_argument("--mesh", metavar="1xM", default="1x1", help="M devices hold the model together (default: 1x1)")
    return parser
