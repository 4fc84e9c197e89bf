"""The flags of a data set, for all commands that draw requests from one."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxvllm.cli.flags import add_flags, flag_of, given, whole
from jaxvllm.core.value_checks import MAX_INT32

if TYPE_CHECKING:
    from jaxvllm.bench.samples import AnyDataset


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name a data set, and those of every data set."""
    from jaxvllm.bench.samples import DATASETS

    data = parser.add_argument_group("data")
    data.add_argument("--dataset-name", choices=DATASETS, default="random", help="default: %(default)s")
    data.add_argument("--dataset-path", type=Path, metavar="FILE", help="for sharegpt (JSON) and custom (JSON lines)")
    data.add_argument(
        "--random-vocab-size",
        type=whole(1, MAX_INT32),
        metavar="N",
        help="random tokens are below this (default: 1000, or all that a tokenizer or model at hand has)",
    )
    for name, dataset in DATASETS.items():
        add_flags(parser, dataset, f"data: {name}")


def chosen_dataset(args: argparse.Namespace) -> tuple["AnyDataset", dict[str, Any]]:
    """Returns the data set that the flags describe, and the options of it that they set."""
    from jaxvllm.bench.samples import DATASETS

    kind = DATASETS[args.dataset_name]
    chosen = given(args, kind)
    return kind(**chosen), chosen


def fit_to_model(
    dataset: "AnyDataset", chosen: Mapping[str, Any], most: int, room: int, command: str = "bench"
) -> "AnyDataset":
    """Returns the data set with requests of at most `room` of the `most` tokens that the model takes.

    It prints the lengths that it changes, after the name of the command. Raises ValueError when the lengths that the
    user chose do not fit.
    """
    from jaxvllm.bench.samples import fit

    if dataset.longest <= room:
        return dataset
    fitted = fit(dataset, chosen, room)
    if fitted is None and dataset.longest <= most:
        return dataset  # all lengths were chosen, and the template may add less than it has room for
    if fitted is None:
        flags = " ".join(f"{flag_of(name)} {value}" for name, value in chosen.items()) or "the data set"
        raise ValueError(
            f"the model takes {most} tokens, prompt and answer together, and {flags} may need {dataset.longest}: "
            "give lengths that fit"
        )
    changes = [
        f"{flag_of(name)} is {value}, not {getattr(dataset, name)}"
        for name, value in vars(fitted).items()
        if value != getattr(dataset, name)
    ]
    print(f"jaxvllm {command}: the model takes {most} tokens, so {' and '.join(changes)}", file=sys.stderr)
    return fitted
