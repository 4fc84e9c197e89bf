"""`jaxvllm bench serve`: puts one load on a running server, and measures it like `vllm bench serve`."""

import argparse
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from jaxvllm.cli.bench.load import add_load_flags, benchmark
from jaxvllm.client.server import Server


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_load_flags(parser)
    result = parser.add_argument_group("result")
    result.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    result.add_argument("--save-detailed", action="store_true", help="add each request's times, texts and errors")
    result.add_argument("--result-dir", type=Path, metavar="DIR", default=Path(), help="default: the current directory")
    result.add_argument("--result-filename", metavar="FILE", help="default: {label}-{rate}qps-{model}-{date}.json")
    result.add_argument("--label", metavar="TEXT", help="default: what --backend says")
    result.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="added to the JSON")


def run(args: argparse.Namespace) -> int:
    from jaxvllm.bench.report import file_name
    from jaxvllm.client.api import Api

    metadata = _metadata(args.metadata)
    if args.save_result and not args.result_dir.is_dir():
        raise ValueError(f"--result-dir {args.result_dir} is no directory: make it first")
    server = Server.from_flags(args)
    with Api(server) as api:
        bench = benchmark(args, server, api)
        result = bench.run(api)
    print(result.table())
    if args.save_result:
        now, label = datetime.now(), args.label or args.backend
        path = args.result_dir / (args.result_filename or file_name(label, result.traffic, bench.target.model, now))
        about = {
            "date": f"{now:%Y%m%d-%H%M%S}",
            "endpoint_type": args.backend,
            "backend": args.backend,
            "label": args.label,
            "model_id": bench.target.model,
            "tokenizer_id": None if args.tokenizer is None else str(args.tokenizer),
            "num_prompts": result.traffic.num_prompts,
            **metadata,
        }
        figures = result.figures() | (result.details() if args.save_detailed else {})
        path.write_text(json.dumps(about | figures) + "\n", encoding="utf-8")
    return 1 if result.summary.failed else 0


def _metadata(pairs: Sequence[str]) -> dict[str, str]:
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise ValueError(f"--metadata takes KEY=VALUE, not {wrong[0]}")
    return {key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in pairs)}
