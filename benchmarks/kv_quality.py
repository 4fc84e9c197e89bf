"""Measures what keys and values in eight bits cost in quality: how far log-probabilities move from those of float32.

The demo model writes texts in float32, and then engines with each kind of pages score them, as they score prompts. The
scales of heads come from other texts of the model, whose largest keys and values are read from the pages of a float32
engine, and are written beside a copy of the weights as calibration tools do. It prints a table and writes
benchmarks/results/kv_quality-DATE-COMMIT.json. No figure depends on the load of the machine.

    python -m benchmarks.kv_quality [--texts 16]
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.result_files import ROOT, machine, write_record
from jaxvllm import LLM, SamplingParams
from jaxvllm.model_name import DEMO_MODEL
from jaxvllm.models import checkpoint
from jaxvllm.runtime.runner import Runner

TOKENS = 512  # of a text
NUM_PAGES = 1200  # of 16 tokens: those of 36 texts
# What a scheme calls codes, and the largest code.
SCHEMES = {"fp8": ("float", 448), "int8": ("int", 127)}


@dataclass(frozen=True)
class Kind:
    """A kind of pages: its name in the table, and the options of an engine that has it."""

    name: str
    kv_cache_dtype: str
    scheme: str | None = None  # of the copy of the model that has scales


KINDS = (
    Kind("e4m3, no scales", "fp8"),
    Kind("e5m2, no scales", "fp8_e5m2"),
    Kind("e4m3, scales of heads", "auto", "fp8"),
    Kind("int8, scales of heads", "auto", "int8"),
    Kind("e4m3, scales of tokens", "fp8_per_token_head"),
    Kind("int8, scales of tokens", "int8_per_token_head"),
)


@dataclass(frozen=True)
class Scores:
    """The probabilities that an engine gives to each token of texts but the first, in the order of the texts."""

    logprobs: np.ndarray  # f64[tokens]
    best: np.ndarray  # i64[tokens]: the most probable token
    token_bytes: int  # of a token's keys and values

    @classmethod
    def of(cls, llm: LLM, texts: list[list[int]]) -> Self:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        logprobs, best = [], []
        for output in llm.generate(texts, params, use_tqdm=False):
            assert output.prompt_logprobs is not None
            for token, of in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
                assert of is not None
                logprobs.append(of[token].logprob)
                best.append(next(other for other, one in of.items() if one.rank == 1))
        pages = _runner(llm).page_like[0]
        layers, heads, _, width = pages.shape
        return cls(np.array(logprobs), np.array(best), layers * heads * width * pages.dtype.itemsize)


@contextmanager
def engine(model: str | Path, kv_cache_dtype: str) -> Iterator[LLM]:
    options: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "num_pages": NUM_PAGES}
    with LLM(
        model=str(model), dtype="float32", kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False, **options
    ) as llm:
        yield llm


def _runner(llm: LLM) -> Runner:
    runner = llm.engine.replicas[0].runner
    assert isinstance(runner, Runner), "a replica that is alone has a runner of its own"
    return runner


def written_texts(llm: LLM, count: int, seed: int) -> list[list[int]]:
    """Returns texts that the model writes from its first token on, of TOKENS tokens each."""
    params = [SamplingParams(temperature=1, seed=seed + i, max_tokens=TOKENS, ignore_eos=True) for i in range(count)]
    begin = [0]
    outputs = llm.generate([begin] * count, params, use_tqdm=False)
    return [[*begin, *output.outputs[0].token_ids] for output in outputs]


def largest(llm: LLM, texts: list[list[int]]) -> np.ndarray:
    """Returns the largest key and the largest value of each KV head in each layer, f32[L, K, 2]."""
    llm.generate(texts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    # Pages that nobody has written to yet are zeros.
    pages = np.abs(_runner(llm).read_pages(np.arange(1, NUM_PAGES)))
    return np.stack([half.max(axis=(1, 3, 4)) for half in np.split(pages, 2, axis=-1)], axis=-1)


def with_scales(directory: Path, most: np.ndarray, scheme: str) -> Path:
    """Writes the demo model with scales, as a checkpoint of compressed-tensors is written."""
    source = DEMO_MODEL
    shutil.copytree(source, directory)
    kind, code = SCHEMES[scheme]
    tensors = load_file(source / "model.safetensors")
    for layer, of_heads in enumerate(most):
        for letter, values in zip("kv", of_heads.T, strict=True):
            name = f"model.layers.{layer}.self_attn.{letter}_scale"
            tensors[name] = (values / code).astype(np.float32).reshape(-1, 1, 1)
    save_file(tensors, directory / "model.safetensors")
    stated = {"num_bits": 8, "type": kind, "strategy": "attn_head", "symmetric": True, "dynamic": False}
    settings = {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": stated}
    config = checkpoint.read_config(source) | {"quantization_config": settings}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def compared(kind: Kind, scores: Scores, exact: Scores) -> dict[str, Any]:
    """Returns a row of the record."""
    error = np.abs(scores.logprobs - exact.logprobs)
    return asdict(kind) | {
        "token_bytes": scores.token_bytes,
        "mean_error": float(error.mean()),
        "largest_error": float(error.max()),
        "same_best_token": float((scores.best == exact.best).mean()),
        "perplexity": float(np.exp(-scores.logprobs.mean())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=16, help="texts that are scored, and as many for the scales")
    args = parser.parse_args()
    device, plain = machine(), Kind("float32", "float32")
    with engine(DEMO_MODEL, plain.kv_cache_dtype) as llm:
        texts, others = (written_texts(llm, args.texts, seed) for seed in (0, args.texts))
        most = largest(llm, others)
        exact = Scores.of(llm, texts)
    rows = [compared(plain, exact, exact)]
    with TemporaryDirectory() as name:
        calibrated = {scheme: with_scales(Path(name) / scheme, most, scheme) for scheme in SCHEMES}
        for kind in KINDS:
            model = DEMO_MODEL if kind.scheme is None else calibrated[kind.scheme]
            with engine(model, kind.kv_cache_dtype) as llm:
                rows.append(compared(kind, Scores.of(llm, texts), exact))
    print(f"{len(exact.logprobs)} tokens of {args.texts} texts; errors of log-probabilities in nats\n")
    print("| keys and values | bytes a token | mean error | largest | same best token | perplexity |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['name']} | {row['token_bytes']} | {row['mean_error']:.5f} | {row['largest_error']:.3f} "
            f"| {100 * row['same_best_token']:.2f}% | {row['perplexity']:.4f} |"
        )
    record = {"texts": args.texts, "tokens": len(exact.logprobs), "largest": most.tolist(), "results": rows}
    print(f"\nwritten to {write_record('kv_quality', device, record).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
