"""The best that this machine does with a few threads, and what a model could do at best on such a machine."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.workload import Workload


@dataclass(frozen=True)
class Bound:
    """The least time of a workload, and its rate, if reading and multiplying took all of it."""

    first_token_seconds: float  # until all prompts are computed, if they are computed together
    tokens_per_second: float


@dataclass(frozen=True)
class Roofline:
    """Rates that were measured on this machine: bytes, and operations of a dtype, per second."""

    read: float
    copy: float
    flops: float

    def bound(self, c: dict[str, Any], load: Workload, weight_bytes: float, kv_bytes: float) -> Bound:
        """Returns the bound of a step that reads each weight and key once, in so many bytes a number.

        It is for the model of the config `c` and requests of one shape. Rows choose experts at random. A prompt needs
        the LM head for its last token alone. The products of attention are left out.
        """
        heads = (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * c["head_dim"]
        multiplied = read = c["intermediate_size"]
        if num_experts := c.get("num_experts"):
            multiplied = c["num_experts_per_tok"] * c["moe_intermediate_size"]
            not_chosen = (1 - c["num_experts_per_tok"] / num_experts) ** load.requests
            read = num_experts * (1 - not_chosen) * c["moe_intermediate_size"]
        of_row, weights = (c["hidden_size"] * c["num_hidden_layers"] * (heads + 3 * ffn) for ffn in (multiplied, read))
        head = c["hidden_size"] * c["vocab_size"]
        kv_token = 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"]
        [prompt_tokens], [output_tokens] = set(load.prompt_tokens), set(load.output_tokens)
        context = prompt_tokens + output_tokens / 2
        step = max(
            (weight_bytes * (weights + head) + kv_bytes * load.requests * context * kv_token) / self.read,
            2 * (of_row + head) * load.requests / self.flops,
        )
        prefill = 2 * load.requests * (of_row * prompt_tokens + head) / self.flops
        whole = prefill + (output_tokens - 1) * step
        return Bound(prefill, load.requests * output_tokens / whole)


def best_seconds(work: Callable[[], object], tries: int = 7) -> float:
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_roofline(dtype: str, threads: int) -> Roofline:
    """Measures reads and copies by a thread on each core, and products of matrices of `dtype` on all of them.

    The quickest of two ways counts. Reads: maxima of a large array, and a matrix by a vector. Products: NumPy's, which
    has float32 alone, and XLA's.
    """
    import jax
    import jax.numpy as jnp

    matrix, vector = np.ones((8192, 8192), np.float32), np.ones(8192, np.float32)  # 256 MiB: beyond any cache
    halves = [(np.empty_like(half), half) for half in np.split(matrix, threads)]

    def on_all_cores(work: Callable[[np.ndarray, np.ndarray], object]) -> None:
        running = [threading.Thread(target=work, args=pair) for pair in halves]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    on_all_cores(np.copyto)  # the first copy pays for the pages
    square = jnp.ones((2048, 2048), dtype)
    product = jax.jit(jnp.dot).lower(square, square).compile()
    seconds = best_seconds(lambda: product(square, square).block_until_ready())
    if dtype == "float32":
        operand = np.ones((2048, 2048), np.float32)
        seconds = min(seconds, best_seconds(lambda: operand @ operand))
    return Roofline(
        read=matrix.nbytes
        / min(best_seconds(lambda: on_all_cores(lambda _, half: half.max())), best_seconds(lambda: matrix @ vector)),
        copy=2 * matrix.nbytes / best_seconds(lambda: on_all_cores(np.copyto)),
        flops=2 * 2048**3 / seconds,
    )
