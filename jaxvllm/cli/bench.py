"""`jaxvllm bench`: puts load on a running server, and measures it like `vllm bench serve`."""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxvllm.cli.exit_code import exit_code
from jaxvllm.cli.flags import add_client_sampling_flags, add_flags, flag_of, given
from jaxvllm.cli.parser import Parser
from jaxvllm.client.server import Server, add_server_flags
from jaxvllm.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxvllm.bench.benchmark import Benchmark
    from jaxvllm.bench.samples import AnyDataset
    from jaxvllm.client.api import Api

COMMANDS = ("serve", "sweep")
CHAT_ROOM = 64  # tokens: more than most chat templates add to a message (36 in Llama 3.1, 4 in the demo model)
USAGE = "%(prog)s [OPTION ...]"
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
# These flags are hidden because --seed is that of the data set, and lengths are given by --*-output-len.
_HIDDEN_SAMPLING = ("seed", "max_tokens", "stop")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a benchmark and returns the exit code: 0, 1 if the server or a request failed, 2 for a wrong option."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        command = next((word for word in words if word in COMMANDS), COMMANDS[0])
        options = shlex.join(word for word in words if word not in COMMANDS)
        parser.error(f"give {' or '.join(COMMANDS)} first: {parser.prog} {command} {options}")
    args = parser.parse_args(words)
    return exit_code("bench", lambda: _sweep(args) if args.command == "sweep" else _serve(args))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="jaxvllm bench", description="Measure a running OpenAI-compatible server.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", usage=USAGE, help="one load: vLLM's table, flags and JSON keys")
    _add_flags(serve)
    result = serve.add_argument_group("result")
    result.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    result.add_argument("--save-detailed", action="store_true", help="add each request's times, texts and errors")
    result.add_argument("--result-dir", type=Path, metavar="DIR", default=Path(), help="default: the current directory")
    result.add_argument("--result-filename", metavar="FILE", help="default: {label}-{rate}qps-{model}-{date}.json")
    result.add_argument("--label", metavar="TEXT", help="default: what --backend says")
    result.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="added to the JSON")
    sweep = commands.add_parser(
        "sweep", usage=USAGE, help="several loads: a JSON line each, and a picture of latency over throughput"
    )
    sweep.add_argument("--request-rates", nargs="+", type=float, default=[], metavar="RATE", help="a point for each")
    sweep.add_argument("--max-concurrencies", nargs="+", type=int, default=[], metavar="N", help="a point for each")
    sweep.add_argument("--output", type=Path, metavar="FILE", default=Path("sweep.jsonl"), help="default: %(default)s")
    sweep.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the sweep (needs jaxvllm[plot])")
    _add_flags(sweep)
    return parser


def _add_flags(parser: argparse.ArgumentParser) -> None:
    from jaxvllm.bench.samples import DATASETS
    from jaxvllm.bench.summary import LATENCIES
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
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait this long for a server that is starting",
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    parser.add_argument(
        "--seed", type=int, metavar="N", default=0, help="seed of prompts, lengths, arrivals (default: %(default)s)"
    )
    add_flags(parser, Traffic, "traffic")
    data = parser.add_argument_group("data")
    data.add_argument("--dataset-name", choices=DATASETS, default="random", help="default: %(default)s")
    data.add_argument("--dataset-path", type=Path, metavar="FILE", help="for sharegpt (JSON) and custom (JSON lines)")
    data.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="tokenizer.json to use instead of asking the server"
    )
    data.add_argument(
        "--random-vocab-size",
        type=int,
        metavar="N",
        help="random tokens are below this (default: 1000, or all of --tokenizer)",
    )
    for name, dataset in DATASETS.items():
        add_flags(parser, dataset, f"data: {name}")
    add_client_sampling_flags(parser, _HIDDEN_SAMPLING)
    figures = parser.add_argument_group("figures")
    figures.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        metavar="NAMES",
        help=f"of {','.join(LATENCIES)} (default: %(default)s)",
    )
    figures.add_argument(
        "--metric-percentiles", default="99", metavar="NUMBERS", help="such as 50,90,99 (default: %(default)s)"
    )
    figures.add_argument(
        "--goodput", nargs="+", metavar="NAME:MS", help="count requests within all limits, such as ttft:100 tpot:50"
    )


def _serve(args: argparse.Namespace) -> int:
    from jaxvllm.bench.report import file_name
    from jaxvllm.client.api import Api

    metadata = _metadata(args.metadata)
    if args.save_result and not args.result_dir.is_dir():
        raise ValueError(f"--result-dir {args.result_dir} is no directory: make it first")
    server = Server.from_flags(args)
    with Api(server) as api:
        benchmark = _benchmark(args, server, api)
        run = benchmark.run(api)
    print(run.table())
    if args.save_result:
        now, label = datetime.now(), args.label or args.backend
        path = args.result_dir / (args.result_filename or file_name(label, run.traffic, benchmark.target.model, now))
        about = {
            "date": f"{now:%Y%m%d-%H%M%S}",
            "endpoint_type": args.backend,
            "backend": args.backend,
            "label": args.label,
            "model_id": benchmark.target.model,
            "tokenizer_id": None if args.tokenizer is None else str(args.tokenizer),
            "num_prompts": run.traffic.num_prompts,
            **metadata,
        }
        figures = run.figures() | (run.details() if args.save_detailed else {})
        path.write_text(json.dumps(about | figures) + "\n", encoding="utf-8")
    return 1 if run.summary.failed else 0


def _sweep(args: argparse.Namespace) -> int:
    from jaxvllm.bench.plot import check_plot, draw_sweep
    from jaxvllm.bench.sweep import heading, loads, sweep
    from jaxvllm.client.api import Api

    if args.plot is not None:
        check_plot(args.plot)
    server = Server.from_flags(args)
    with Api(server) as api:
        benchmark = _benchmark(args, server, api)
        traffics = loads(benchmark.traffic, args.request_rates, args.max_concurrencies)
        print(heading())
        points = []
        for point in sweep(benchmark, api, traffics, args.output):
            points.append(point)
            print(point.row(), flush=True)
    if args.plot is not None:
        draw_sweep(points, f"{benchmark.target.model} at {server.base_url}", args.plot)
    return 1 if any(point.run.summary.failed for point in points) else 0


def _benchmark(args: argparse.Namespace, server: Server, api: "Api") -> "Benchmark":
    """Makes a benchmark of the flags. Asks the server for its model when none is given."""
    from jaxvllm.bench.benchmark import Benchmark, patiently
    from jaxvllm.bench.load import Target
    from jaxvllm.bench.samples import DATASETS
    from jaxvllm.bench.summary import Goodput
    from jaxvllm.bench.traffic import Traffic
    from jaxvllm.bench.vocabulary import LocalTokenizer, ServerTokenizer, Vocabulary

    kind = DATASETS[args.dataset_name]
    is_chat = args.backend == "openai-chat"
    fields: dict[str, Any] = given(args, SamplingParams, skip=("ignore_eos",))
    if args.ignore_eos or (args.ignore_eos is None and args.dataset_name == "random"):
        fields["ignore_eos"] = True
    traffic, chosen = Traffic(**given(args, Traffic)), given(args, kind)
    dataset = kind(**chosen)
    goodput = Goodput.parse(args.goodput) if args.goodput else None
    names, percentiles = _names(args.percentile_metrics), _percentiles(args.metric_percentiles)
    fields |= _object("--extra-body", args.extra_body)
    model = args.model or patiently(api.first_model, args.ready_check_timeout_sec)
    most = patiently(lambda: api.max_model_len(model), args.ready_check_timeout_sec)
    if most is not None:
        dataset = _fitted(dataset, chosen, most, is_chat)
    tokens = ServerTokenizer(api, model) if args.tokenizer is None else LocalTokenizer(args.tokenizer)
    target = Target(server, model, args.endpoint or ENDPOINTS[args.backend], is_chat, fields)
    return Benchmark(
        target,
        traffic,
        dataset,
        args.dataset_path,
        Vocabulary(tokens, args.random_vocab_size, sends_text=is_chat),
        args.seed,
        names,
        percentiles,
        goodput,
        args.ready_check_timeout_sec,
        not args.disable_tqdm,
    )


def _fitted(dataset: "AnyDataset", chosen: Mapping[str, Any], most: int, is_chat: bool) -> "AnyDataset":
    """Returns the data set with requests of at most `most` tokens, which the model takes. Prints changed lengths.

    Raises ValueError when the lengths that the user chose do not fit.
    """
    from jaxvllm.bench.samples import fit

    room = most - CHAT_ROOM if is_chat else most
    if dataset.longest <= room:
        return dataset
    fitted = fit(dataset, chosen, room)
    if fitted is None and dataset.longest <= most:
        return dataset  # all lengths were chosen, and the template may add less than CHAT_ROOM
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
    print(f"jaxvllm bench: the model takes {most} tokens, so {' and '.join(changes)}", file=sys.stderr)
    return fitted


def _names(text: str) -> list[str]:
    from jaxvllm.bench.summary import LATENCIES

    wanted = text.split(",")
    if unknown := [name for name in wanted if name not in LATENCIES]:
        raise ValueError(f"--percentile-metrics takes {','.join(LATENCIES)}, not {unknown[0]}")
    return [name for name in LATENCIES if name in wanted]


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise ValueError(f"--metric-percentiles takes numbers from 0 to 100, such as 50,99, not {text}")
    return values


def _object(flag: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{flag} must be a JSON object, not {text}")
    return value


def _metadata(pairs: Sequence[str]) -> dict[str, str]:
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise ValueError(f"--metadata takes KEY=VALUE, not {wrong[0]}")
    return {key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in pairs)}
