"""The least time that a step can take, from the published rates of a chip: a floor and never a forecast.

A step must read its weights and the keys and values that it attends to, multiply, and hear from the other devices. What
else takes time (launches, latency, padding, activations, imperfect overlap) is not here, so no device is as fast.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from jaxvllm.planner.collectives import Collective
from jaxvllm.planner.findings import Findings
from jaxvllm.planner.job import Job
from pallas_kernels.chips import Chip

BATCHES = (1, 8, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Floor:
    """One step on each device, in seconds. Memory and matrix units work side by side, and the links after them."""

    num_tokens: int  # that the step computes
    memory: float
    compute: float
    links: float
    seconds: float  # of all
    tokens_per_second: float  # of a replica

    @classmethod
    def of(cls, num_tokens: int, memory: float, compute: float, links: float) -> Self:
        seconds = max(memory, compute) + links
        return cls(num_tokens, memory, compute, links, seconds, num_tokens / seconds)


def decode_floors(job: Job, chip: Chip, findings: Findings, context: int, num_tokens: int) -> tuple[Floor, ...]:
    """A step of as many rows as each of `BATCHES` that has room in `num_tokens` tokens of KV, with greedy sampling.

    Every row attends to `context` positions, its own among them.
    """
    batches = [rows for rows in BATCHES if rows <= job.max_num_seqs and rows * context <= num_tokens]
    return tuple(_decode_floor(job, chip, findings, context, rows) for rows in batches)


def _decode_floor(job: Job, chip: Chip, findings: Findings, context: int, rows: int) -> Floor:
    seen = rows * sum(min(context, window or context) for window in job.spec.windows)
    # Collectives carry a row's activations each: fewer rows, as many fewer bytes.
    links = _link_seconds(job, chip, findings.decode.collectives) * rows / findings.decode.num_rows
    return _floor(job, chip, num_tokens=rows, num_rows=rows, positions_read=seen, pairs=seen, links=links)


def prefill_floor(job: Job, chip: Chip, findings: Findings) -> Floor:
    """The largest step, full of the first tokens of one prompt."""
    tokens = job.max_num_batched_tokens
    pairs = sum(_pairs(tokens, window or tokens) for window in job.spec.windows)
    read = tokens * job.spec.num_layers
    links = _link_seconds(job, chip, findings.largest.collectives)
    return _floor(job, chip, num_tokens=tokens, num_rows=1, positions_read=read, pairs=pairs, links=links)


def _floor(
    job: Job, chip: Chip, *, num_tokens: int, num_rows: int, positions_read: int, pairs: int, links: float
) -> Floor:
    """`positions_read` and `pairs` (of a query and a position that it sees) are of all layers together."""
    spec, share = job.share.spec, job.share
    # The keys and values of one token in one layer: every one that is seen is read, every new one written.
    kv_bytes = job.page_bytes / (job.page_size * spec.num_layers)
    kv = (positions_read + num_tokens * spec.num_layers) * kv_bytes
    # Two products, q k' and p v, of 2 D operations a pair.
    flops = share.flops(num_tokens, num_rows) + 4 * pairs * spec.num_heads * spec.head_size
    return Floor.of(
        num_tokens,
        memory=(share.bytes_read + kv) / chip.hbm_bandwidth,
        compute=flops / chip.bf16_flops,
        links=links,
    )


def _link_seconds(job: Job, chip: Chip, collectives: Iterable[Collective]) -> float:
    """Of what greedy rows need. Chips form the ring; how fast the devices of one chip reach each other is not known."""
    num_chips = -(-job.size // chip.devices_per_chip)
    if num_chips == 1:
        return 0.0
    sent = sum(each.bytes_sent(num_chips) for each in collectives if not each.conditional)
    return sent / chip.ring_bandwidth(num_chips)


def _pairs(tokens: int, window: int) -> int:
    """The query at position p sees min(p + 1, window) positions."""
    full = min(tokens, window)
    return full * (full + 1) // 2 + (tokens - full) * window
