"""Runs attention of torch, FlashInfer and vLLM on CUDA as a worker: JSON requests on stdin, answers on stdout.

It is a process of its own, because JAX and torch both take the card's memory. It imports nothing of this repository, so
that any environment can run it. An empty request asks which peers are here: `{"versions": {...}, "missing": {peer:
reason}}`. Others name a peer and a case of even rows. Their answer, in one line, has seconds a layer and the error of
one output, or a problem:

    sdpa         torch.nn.functional.scaled_dot_product_attention, contiguous KV: the fastest of its implementations
    flashinfer   BatchDecodeWithPagedKVCacheWrapper and BatchPrefillWithPagedKVCacheWrapper
    vllm         vLLM's build of FlashAttention over its paged cache

Layers take turns, so that none is in the cache. They are captured in one CUDA graph, so that no launch gap counts.
"""

import gc
import importlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SAMPLES = 11
SAMPLE_SECONDS = 0.03
MAX_CALLS = 200

# One layer's call: its output, of whatever shape.
Layer = Callable[..., Any]


@dataclass(frozen=True)
class Batch:
    """Even rows of random keys and values for some layers, in pages `[pages, S, K, D]` that lie anywhere."""

    batch: int
    query_len: int
    kv_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    scale: float
    dtype: str
    layers: int
    device: str = "cuda"

    @property
    def row_pages(self) -> int:
        return -(-self.kv_len // self.page_size)

    def random(self, *shape: int) -> Any:
        import torch

        return torch.randn(*shape, dtype=getattr(torch, self.dtype), device=self.device)

    def queries(self) -> Any:
        return self.random(self.batch * self.query_len, self.num_heads, self.head_size)

    def pages(self) -> list[tuple[Any, Any]]:
        shape = (self.batch * self.row_pages, self.page_size, self.num_kv_heads, self.head_size)
        return [(self.random(*shape), self.random(*shape)) for _ in range(self.layers)]

    def table(self) -> Any:
        """Returns the page table i32[R, pages of a row]."""
        import torch

        order = torch.randperm(self.batch * self.row_pages, device=self.device, dtype=torch.int32)
        return order.reshape(self.batch, self.row_pages)

    def starts(self, step: int) -> Any:
        """Returns i32[R + 1]: 0, step, 2 step, ..."""
        import torch

        return torch.arange(self.batch + 1, device=self.device, dtype=torch.int32) * step


@dataclass(frozen=True)
class Prepared:
    """A peer that is ready for a batch: its layers, and the keys and values of the first row in the last layer."""

    layers: list[Layer]
    query: Any  # [H, D]
    keys: Any  # [kv_len, K, D]
    values: Any
    first_row: Callable[[Any], Any]  # of an output: [query_len, H, D]
    note: str = ""


def prepare_sdpa(batch: Batch, backend: str) -> Prepared:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (batch.batch, batch.num_kv_heads, batch.kv_len, batch.head_size)
    q = batch.random(batch.batch, batch.num_heads, batch.query_len, batch.head_size)
    kv = [(batch.random(*shape), batch.random(*shape)) for _ in range(batch.layers)]

    def layer(k: Any, v: Any) -> Any:
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=batch.query_len > 1, scale=batch.scale, enable_gqa=True
            )

    k, v = kv[-1]
    layers = [lambda k=k, v=v: layer(k, v) for k, v in kv]
    first = (k[0].transpose(0, 1), v[0].transpose(0, 1))
    return Prepared(layers, q[0, :, -1], *first, lambda out: out[0].transpose(0, 1), backend.lower())


def prepare_flashinfer(batch: Batch, _: str) -> Prepared:
    import torch

    flashinfer = importlib.import_module("flashinfer")
    q, pages, table = batch.queries(), batch.pages(), batch.table()
    last_page_lens = torch.full(
        (batch.batch,), batch.kv_len - (batch.row_pages - 1) * batch.page_size, device=batch.device, dtype=torch.int32
    )
    heads = (batch.num_heads, batch.num_kv_heads, batch.head_size, batch.page_size)
    workspace = torch.empty(512 * 2**20, dtype=torch.uint8, device=batch.device)
    paged = (batch.starts(batch.row_pages), table.flatten(), last_page_lens)
    options = {"q_data_type": q.dtype, "kv_data_type": q.dtype, "sm_scale": batch.scale}
    if batch.query_len == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*paged, *heads, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(batch.starts(batch.query_len), *paged, *heads, causal=True, **options)
    layers = [lambda kv=kv: wrapper.run(q, kv) for kv in pages]
    first = _first_row(batch, pages[-1], table)
    return Prepared(layers, q[batch.query_len - 1], *first, lambda out: out[: batch.query_len])


def prepare_vllm(batch: Batch, _: str) -> Prepared:
    import torch

    attention = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    q, pages, table = batch.queries(), batch.pages(), batch.table()
    kv_lens = torch.full((batch.batch,), batch.kv_len, device=batch.device, dtype=torch.int32)
    starts = batch.starts(batch.query_len)

    def layer(k: Any, v: Any) -> Any:
        return attention(
            q, k, v, max_seqlen_q=batch.query_len, cu_seqlens_q=starts, max_seqlen_k=batch.kv_len, seqused_k=kv_lens,
            block_table=table, causal=True, softmax_scale=batch.scale,
        )  # fmt: skip

    layers = [lambda k=k, v=v: layer(k, v) for k, v in pages]
    first = _first_row(batch, pages[-1], table)
    return Prepared(layers, q[batch.query_len - 1], *first, lambda out: out[: batch.query_len])


def _first_row(batch: Batch, kv: tuple[Any, Any], table: Any) -> tuple[Any, Any]:
    """Returns keys and values [kv_len, K, D] of the first row."""
    k, v = (x[table[0].long()].reshape(-1, batch.num_kv_heads, batch.head_size)[: batch.kv_len] for x in kv)
    return k, v


# The module that a peer needs, how it is prepared, and its variants, of which the fastest counts.
PEERS: dict[str, tuple[str, Callable[[Batch, str], Prepared], tuple[str, ...]]] = {
    "sdpa": ("torch", prepare_sdpa, ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")),
    "flashinfer": ("flashinfer", prepare_flashinfer, ("",)),
    "vllm": ("vllm.vllm_flash_attn", prepare_vllm, ("",)),
}


def who_is_here() -> dict[str, Any]:
    versions, missing = {}, {}
    for peer, (module, _, _) in PEERS.items():
        try:
            import torch

            if not torch.cuda.is_available():
                raise RuntimeError("torch sees no CUDA device")
            importlib.import_module(module)
            package = importlib.import_module(module.split(".")[0])
            versions[package.__name__] = str(package.__version__)
        except Exception as error:  # an extension that does not fit raises anything
            missing[peer] = f"{type(error).__name__}: {error}".split("\n")[0]
    return {"versions": versions, "missing": missing}


def error_of(prepared: Prepared, out: Any, batch: Batch) -> float:
    """Returns the largest relative error of a head of the first row's last query, against float64."""
    import torch

    group = batch.num_heads // batch.num_kv_heads
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (prepared.keys, prepared.values))
    weights = torch.softmax(torch.einsum("hd,shd->hs", prepared.query.double(), k) * batch.scale, dim=-1)
    expected = torch.einsum("hs,shd->hd", weights, v)
    difference = prepared.first_row(out)[-1].double() - expected
    return float((difference.norm(dim=-1) / expected.norm(dim=-1)).nan_to_num(nan=math.inf).max())


def capture(layers: list[Layer]) -> tuple[Callable[[], object], str]:
    """Makes one call of all layers: a CUDA graph, or one layer after the other if a peer cannot be captured."""
    import torch

    def eager() -> None:
        for layer in layers:
            layer()

    eager()  # the warm-up compiles, chooses and allocates
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            eager()
    except Exception:
        torch.cuda.synchronize()
        return eager, "without a CUDA graph"
    return graph.replay, "CUDA graph"


def seconds(call: Callable[[], object], calls: int) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(peer: str, variant: str, batch: Batch) -> dict[str, Any]:
    prepared = PEERS[peer][1](batch, variant)
    error = error_of(prepared, prepared.layers[-1](), batch)
    if not error <= 2e-2:
        return {"problem": f"{prepared.note} error {error:.1e}: not timed"}
    call, how = capture(prepared.layers)
    seconds(call, 1)
    calls = max(1, min(MAX_CALLS, math.ceil(SAMPLE_SECONDS / seconds(call, 1))))
    samples = [seconds(call, calls) / (calls * batch.layers) for _ in range(SAMPLES)]
    return {"samples": samples, "error": error, "note": ", ".join(filter(None, (prepared.note, how)))}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    peer, batch = request["peer"], Batch(**request["batch"])
    answers, problems = [], []
    for variant in PEERS[peer][2]:
        try:
            measured = measure(peer, variant, batch)
        except Exception as error:
            # Memory may be short, or an implementation may not take this case.
            measured = {"problem": f"{variant} {type(error).__name__}: {error}".strip().split("\n")[0]}
        gc.collect()
        torch.cuda.empty_cache()
        if "samples" in measured:
            answers.append(measured)
        else:
            problems.append(measured["problem"])
    if not answers:
        return {"problem": "; ".join(problems)}
    return min(answers, key=lambda measured: statistics.median(measured["samples"]))


def main() -> None:
    # Libraries may print anything, so answers have a descriptor of their own.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(answer(request) if request else who_is_here()), file=answers, flush=True)


if __name__ == "__main__":
    main()
