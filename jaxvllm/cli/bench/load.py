"""The flags of a load, which `bench serve` and `bench sweep` share, and the benchmark that they describe."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxvllm.cli.bench.data import add_data_flags, chosen_dataset, fit_to_model
from jaxvllm.cli.bench.figures import Figures, add_figure_flags
from jaxvllm.cli.flags import add_client_sampling_flags, add_flags, given, real, seed_number
from jaxvllm.client.server import Server, add_server_flags
from jaxvllm.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxvllm.bench.benchmark import Benchmark
    from jaxvllm.client.api import Api

CHAT_ROOM = 64  # tokens: more than most chat templates add to a message (36 in Llama 3.1, 4 in the demo model)
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
# These flags are hidden because --seed is that of the data set, and lengths are given by --*-output-len.
_HIDDEN_SAMPLING = ("seed", "max_tokens", "stop")


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of everything but the results."""
    from jaxvllm.bench.traffic import Traffic

    add_server_flags(parser)
    parser.add_argument(
        "--backend", choices=ENDPOINTS, default="openai", help="completions or chat (default: %(default)s)"
    )
    parser.add_argument("--endpoint", metavar="PATH", help="default: /v1/completions or /v1/chat/completions")
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="make all answers as long as requested (default: with random data)",
    )
    parser.add_argument("--extra-body", metavar="JSON", help="an object whose fields every request gets")
    parser.add_argument(
        "--ready-check-timeout-sec",
        type=real(0, 1e6),
        default=0.0,
        metavar="SECONDS",
        help="wait this long for a server that is starting",
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    parser.add_argument(
        "--seed",
        type=seed_number,
        metavar="N",
        default=0,
        help="seed of prompts, lengths, arrivals (default: %(default)s)",
    )
    add_flags(parser, Traffic, "traffic")
    add_data_flags(parser)
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="tokenizer.json to use instead of asking the server"
    )
    add_client_sampling_flags(parser, _HIDDEN_SAMPLING)
    add_figure_flags(parser)


def benchmark(args: argparse.Namespace, server: Server, api: "Api") -> "Benchmark":
    """Makes a benchmark of the flags. Asks the server for its model when none is given."""
    from jaxvllm.bench.benchmark import Benchmark, patiently
    from jaxvllm.bench.load import RequestTarget
    from jaxvllm.bench.traffic import Traffic
    from jaxvllm.bench.vocabulary import LocalTokenizer, ServerTokenizer, Vocabulary

    is_chat = args.backend == "openai-chat"
    fields: dict[str, Any] = given(args, SamplingParams, skip=("ignore_eos",))
    if args.ignore_eos or (args.ignore_eos is None and args.dataset_name == "random"):
        fields["ignore_eos"] = True
    SamplingParams(**fields)  # raises for a value that no server takes
    traffic = Traffic(**given(args, Traffic))
    dataset, chosen = chosen_dataset(args)
    figures = Figures.of_flags(args)
    fields |= _object("--extra-body", args.extra_body)
    model = args.model or patiently(api.first_model, args.ready_check_timeout_sec)
    most = patiently(lambda: api.max_model_len(model), args.ready_check_timeout_sec)
    if most is not None:
        room = most - CHAT_ROOM if is_chat else most
        dataset = fit_to_model(dataset, chosen, most, room)
    tokens = ServerTokenizer(api, model) if args.tokenizer is None else LocalTokenizer(args.tokenizer)
    target = RequestTarget(server, model, args.endpoint or ENDPOINTS[args.backend], is_chat, fields)
    return Benchmark(
        target,
        traffic,
        dataset,
        args.dataset_path,
        Vocabulary(tokens, args.random_vocab_size, sends_text=is_chat),
        args.seed,
        figures.names,
        figures.percentiles,
        figures.goodput,
        args.ready_check_timeout_sec,
        not args.disable_tqdm,
    )


def _object(flag: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{flag} must be a JSON object, not {text}")
    return value
