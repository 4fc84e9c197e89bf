"""Measures what each form of the weights does to the embedded model's answers, on text that it was not trained on.

The engine reads held-out documents of the corpus (`tools/demo_corpus.py`), a few of each kind, and reports the logits
of every token of the vocabulary at every position. They are compared with those of the same engine in float32:

- perplexity of the documents' tokens;
- KL: the mean over positions of the divergence KL(float32 || form), in nats, and the 99th percentile of positions;
- error of logits: the root of the mean square of their difference, beside the standard deviation of float32's;
- share of positions where both have the same best token.

Activations are float32 in all of them but bfloat16, so that the difference is that of the weights. Embeddings, which
are the LM head too, have eight bits beside int8 and int4, and else stay as they are, or as GGUF files store them. The
bits a weight are those that the layers take, scales and norms included. This
writes benchmarks/results/quality-DATE-COMMIT.json and, with matplotlib, a picture beside it.

    python -m benchmarks.quality [--documents 2]
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer

from benchmarks.published_checkpoints import write_awq, write_gguf, write_mxfp4, write_nf4, write_nvfp4
from benchmarks.result_files import ROOT, machine, write_record
from jaxvllm import LLM, SamplingParams
from jaxvllm.model_name import DEMO_MODEL
from tools.demo_corpus import EVALUATION_SEED, KINDS, Corpus

PUBLISHED = (
    *(("MXFP4 (MLX)", write_mxfp4), ("NVFP4 (ModelOpt)", write_nvfp4), ("NF4 (bitsandbytes)", write_nf4)),
    ("AWQ's layout", write_awq),
)
MARKERS, TICKS = "osD^vP*X<>", (4, 5, 6, 8, 16)  # of the picture
LONGEST = 384  # tokens of a document
ROWS = 128  # tokens of a step


@dataclass(frozen=True)
class Variant:
    """A way to keep the model's weights: options of the engine."""

    name: str
    options: Mapping[str, Any]
    stored_bits: float | None = None  # a weight of the layers in the files, where they are not kept so


@dataclass(frozen=True)
class Quality:
    """Tells how a variant's logits differ from those of float32."""

    name: str
    bits: float  # a weight of the layers
    perplexity: float
    kl: float  # nats, the mean of all positions
    kl_99: float  # nats, the 99th percentile of positions
    logits_error: float  # root of the mean square
    same_best: float  # share of positions


@dataclass
class Comparison:
    """Sums over documents, of one variant beside float32."""

    losses: list[np.ndarray] = field(default_factory=list)
    divergences: list[np.ndarray] = field(default_factory=list)
    squares: list[np.ndarray] = field(default_factory=list)
    agreements: list[np.ndarray] = field(default_factory=list)

    def add(self, tokens: Sequence[int], logits: np.ndarray, expected: np.ndarray) -> None:
        """Adds a document: logits f32[T - 1, V] of what follows each of its T tokens but the last."""
        own, exact = log_softmax(logits), log_softmax(expected)
        self.losses.append(-own[np.arange(len(own)), np.asarray(tokens[1:])])
        self.divergences.append((np.exp(exact) * (exact - own)).sum(-1))
        self.squares.append(np.square(logits - expected).mean(-1))
        self.agreements.append(logits.argmax(-1) == expected.argmax(-1))

    def quality(self, name: str, bits: float) -> Quality:
        divergences = np.concatenate(self.divergences)
        return Quality(
            name,
            bits,
            perplexity=float(np.exp(np.concatenate(self.losses).mean())),
            kl=float(divergences.mean()),
            kl_99=float(np.percentile(divergences, 99)),
            logits_error=float(np.sqrt(np.concatenate(self.squares).mean())),
            same_best=float(np.concatenate(self.agreements).mean()),
        )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    values: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return values


def held_out_documents(per_kind: int) -> list[list[int]]:
    """Returns the tokens of the first documents of each kind, of those that were held out of training."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    wanted: dict[str, list[list[int]]] = {kind: [] for kind in KINDS}
    for document in Corpus(EVALUATION_SEED).part(held_out=True):
        if len(found := wanted[document.kind]) < per_kind:
            found.append(tokenizer.encode(document.text, add_special_tokens=False).ids[:LONGEST])
        elif all(len(found) == per_kind for found in wanted.values()):
            break
    return [tokens for documents in wanted.values() for tokens in documents]


@contextmanager
def engine(options: Mapping[str, Any]) -> Iterator[LLM]:
    usual: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_seqs": 1,
        "max_num_batched_tokens": ROWS,
        "token_buckets": (ROWS,),
        "max_logprobs": -1,
        "logprobs_mode": "raw_logits",
    }
    with LLM(**usual, **options) as llm:
        yield llm


def document_logits(llm: LLM, tokens: Sequence[int]) -> np.ndarray:
    """Returns the logits f32[T - 1, V] of what follows each of a document's T tokens but the last."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=-1, flat_logprobs=True, detokenize=False)
    [output] = llm.generate([{"prompt_token_ids": list(tokens)}], params, use_tqdm=False)
    flat: Any = output.prompt_logprobs
    logits = []
    for start, end in islice(zip(flat.start_indices, flat.end_indices, strict=True), 1, None):
        row = np.empty(end - start, np.float32)  # each token of the vocabulary is there once
        row[flat.token_ids[start:end]] = flat.logprobs[start:end]
        logits.append(row)
    return np.stack(logits)


def layer_bytes(llm: LLM) -> int:
    """Returns the bytes that the arrays of the layers take."""
    return sum(array.nbytes for array in jax.tree.leaves(llm.engine.holders[0].params["layers"]))


def variants(directory: Path) -> Iterator[Variant]:
    """Yields everything that is compared with float32. Checkpoints are written to `directory`."""
    yield Variant("bfloat16", {"dtype": "bfloat16"})
    for name in ("int8", "fp8", "int4", "int4_g32"):
        yield Variant(name, {"quantization": name})
    for name, write in PUBLISHED:
        path = directory / name
        yield Variant(name, {"model": str(path)}, write(path))
    for kind in ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"):
        path = directory / f"{kind}.gguf"
        yield Variant(f"GGUF {kind}", {"model": str(path)}, write_gguf(path, kind))


def draw(found: Sequence[Quality], title: str, path: Path) -> None:
    """Draws KL and perplexity over the bits of a weight."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    exact, *others = found
    for axes, label, of in (
        (left, "KL(float32 || form), nats a token", [one.kl for one in others]),
        (right, "perplexity beside float32's, %", [100 * (one.perplexity / exact.perplexity - 1) for one in others]),
    ):
        for number, (one, value) in enumerate(zip(others, of, strict=True)):
            look = {"color": f"C{number % 7}", "marker": MARKERS[number % len(MARKERS)]}  # different for 70 forms
            axes.scatter(one.bits, value, label=one.name, **look)
        axes.set_xscale("log", base=2)
        axes.set_xticks(TICKS, map(str, TICKS))
        axes.set_xlabel("bits a weight of the layers")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    left.set_yscale("log")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=2, help="of each kind")
    args = parser.parse_args()
    host = machine()
    documents = held_out_documents(args.documents)
    num_positions = sum(len(tokens) - 1 for tokens in documents)
    found = []
    with engine({"dtype": "float32"}) as llm:
        expected = [document_logits(llm, tokens) for tokens in documents]
        in_float32 = layer_bytes(llm)
    exact = Comparison()
    for tokens, logits in zip(documents, expected, strict=True):
        exact.add(tokens, logits, logits)
    found.append(exact.quality("float32", 32.0))
    deviation = float(np.sqrt(np.mean([np.square(one - one.mean(-1, keepdims=True)).mean() for one in expected])))
    with tempfile.TemporaryDirectory() as directory:
        for variant in variants(Path(directory)):
            compared = Comparison()
            with engine({"dtype": "float32", **variant.options}) as llm:
                bits = variant.stored_bits or 32 * layer_bytes(llm) / in_float32
                for tokens, logits in zip(documents, expected, strict=True):
                    compared.add(tokens, document_logits(llm, tokens), logits)
            found.append(compared.quality(variant.name, bits))
            print(found[-1], flush=True)
    tell(found)
    record = {
        "documents": len(documents),
        "positions": num_positions,
        "logits_deviation": deviation,
        "results": [asdict(one) for one in found],
    }
    path = write_record("quality", host, record)
    print(f"\n{num_positions} positions, logits deviate by {deviation:.2f}; written to {path.relative_to(ROOT)}")
    if find_spec("matplotlib") is not None:
        draw(found, f"the embedded model, {num_positions} tokens, {path.stem}", path.with_suffix(".png"))


def tell(found: Sequence[Quality]) -> None:
    """Prints a table."""
    print("| weights | bits | perplexity | KL, nats | KL, 99% | error of logits | same best token |")
    print("|---|---|---|---|---|---|---|")
    for one in found:
        cells = f"{one.bits:.2f} | {one.perplexity:.4f} | {one.kl:.2e} | {one.kl_99:.2e} | {one.logits_error:.4f}"
        print(f"| {one.name} | {cells} | {one.same_best:.2%} |")


if __name__ == "__main__":
    main()
