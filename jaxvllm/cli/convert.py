"""`jaxvllm convert`: writes a checkpoint as an orbax tree for devices, or quantized as compressed-tensors does."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from jaxvllm.cli.parser import Parser
from jaxvllm.config import Quantization
from sharding.mesh import MeshShape

FORMATS = ("orbax", "compressed-tensors")
QUANTIZATIONS = get_args(Quantization)
DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Converts and returns the exit code: 0, or 2 with a line on standard error when an option is wrong."""
    args = _parser().parse_args(argv)
    try:
        shape = MeshShape.parse(args.mesh)
        if (copies := shape.num_devices // shape.model) > 1:
            raise ValueError(f"mesh {shape} would hold {copies} copies of the model: give 1x{shape.num_devices}")
        if args.format == "orbax":
            if args.quantization is not None:
                raise ValueError("an orbax tree has the weights in 16 or 32 bits: give --format compressed-tensors too")
            _convert_to_tree(args, shape)
        else:
            if args.quantization is None:
                raise ValueError(f"--format compressed-tensors needs --quantization: {', '.join(QUANTIZATIONS)}")
            if shape.num_devices > 1:
                raise ValueError(f"mesh {shape} is for orbax trees: a quantized checkpoint is the same for all meshes")
            _convert_quantized(args)
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"jaxvllm convert: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"{args.output} holds the model: load it on any mesh with --model {args.output}")
    return 0


def _convert_to_tree(args: argparse.Namespace, shape: MeshShape) -> None:
    # Imported after parsing, because --help needs no device.
    import jax

    from jaxvllm.model_name import resolve
    from jaxvllm.models.checkpoint import convert
    from sharding.placement import make_mesh

    convert(resolve(args.model), args.output, dtype=args.dtype, mesh=make_mesh(shape, jax.devices()))


def _convert_quantized(args: argparse.Namespace) -> None:
    from jaxvllm.model_name import resolve
    from jaxvllm.models.quantized_conversion import convert_quantized

    convert_quantized(resolve(args.model), args.output, quantization=args.quantization, dtype=args.dtype)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxvllm convert",
        usage="%(prog)s --model MODEL --output DIR [OPTION ...]",
        description="Write a checkpoint as an orbax tree, split over devices. It needs jaxvllm[orbax], and the whole "
        "model is on the devices meanwhile: on CPU, in the host's memory. Or write it quantized, in the format of "
        "compressed-tensors, one matrix after another.",
    )
    parser.add_argument("--model", required=True, help="a directory in Hugging Face format, or a hub name")
    parser.add_argument(
        "--output", required=True, type=Path, metavar="DIR", help="a directory that is empty or does not exist yet"
    )
    parser.add_argument("--format", choices=FORMATS, default="orbax", help="what is written (default: orbax)")
    parser.add_argument(
        "--quantization", "-q", choices=QUANTIZATIONS, help="how compressed-tensors rounds the matrices of layers"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: what the config states (default: auto)")
    parser.add_argument("--mesh", metavar="1xM", default="1x1", help="M devices hold the model together (default: 1x1)")
    return parser
