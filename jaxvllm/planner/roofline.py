"""Computes the least time that a step can take, from the published rates of a chip: a floor and never a forecast.

A step must read its weights and the keys and values that it attends to, multiply, and receive data from the other
devices. Other costs (launches, latency, padding, activations, imperfect overlap) are not counted, so no device is as
fast.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from jaxvllm.planner.compiler import Findings
from jaxvllm.planner.deployment import Deployment
from jaxvllm.planner.hlo import ALL_DEVICES, Collective
from pallas_kernels.chips import Chip
from sharding.rules import DATA, MODEL

BATCHES = (1, 8, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Floor:
    """The times of one step on each device, in seconds. Memory and matrix units work at once, then the links."""

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


@dataclass(frozen=True)
class StepRates:
    """The few numbers that decide how long a step takes at least on each device. Many floors are computed from them
    quickly.

    Positions read, and pairs of a query and a position that it sees, are sums over all layers. Where layers are divided
    among stages, the numbers are means over stages.
    """

    layer_bytes: float  # weights of the layers without experts, which every microbatch reads
    outer_bytes: float  # other weights that every step reads
    expert_bytes: float  # of all experts
    chosen: float  # the part of them that a token chooses
    replicas: int  # whose tokens come to them
    kv_bytes: float  # keys and values of one token in one layer
    num_layers: float  # that see positions
    state_bytes: float  # states of a row, in all layers that keep one
    token_flops: float  # of a token that is computed, in matrix products
    row_flops: float  # of a row that samples
    pair_flops: int
    bandwidth: float  # bytes/s
    flops: float  # FLOP/s

    @classmethod
    def of(cls, deployment: Deployment, chip: Chip) -> Self:
        share = deployment.share
        attentions = [layer.attention for layer in share.spec.layers if not layer.memory.keeps_state]
        some = max(len(attentions), 1)  # a model may keep states alone
        return cls(
            layer_bytes=share.layer_bytes - share.expert_bytes,
            outer_bytes=share.bytes_read - share.layer_bytes,
            expert_bytes=share.expert_bytes,
            chosen=share.chosen,
            replicas=share.replicas,
            kv_bytes=deployment.page_bytes * deployment.stages / (deployment.page_size * some),
            num_layers=len(attentions) / deployment.stages,
            state_bytes=deployment.state_bytes,
            token_flops=share.flops(1, 0),
            row_flops=share.flops(0, 1),
            # There are two products, q k' and p v, each with 2 D operations per pair.
            # Where layers differ, a pair costs their mean.
            pair_flops=sum(4 * of.num_heads * of.head_size for of in attentions) // some,
            bandwidth=chip.hbm_bandwidth,
            flops=chip.bf16_flops,
        )

    def memory(self, num_tokens: float, num_rows: float, positions_read: float, ticks: int = 1) -> float:
        """Returns the seconds of reading weights, keys and values, and of writing those of `num_tokens` tokens.

        The states of each row are read and written once. Experts are read if one of the tokens chooses them, where
        each is as likely as the others. Where replicas share the experts, all of them have as many tokens.
        ticks: how often the weights of the layers are read
        """
        kv = (positions_read + num_tokens * self.num_layers) * self.kv_bytes + 2 * num_rows * self.state_bytes
        experts = self.expert_bytes * (1 - math.pow(1 - self.chosen, self.replicas * num_tokens / ticks))
        return (self.outer_bytes + ticks * (self.layer_bytes + experts) + kv) / self.bandwidth

    def compute(self, num_tokens: float, num_rows: float, pairs: float) -> float:
        """Returns the seconds of all multiplications."""
        flops = num_tokens * self.token_flops + num_rows * self.row_flops + pairs * self.pair_flops
        return flops / self.flops


def decode_floors(
    deployment: Deployment, chip: Chip, findings: Findings, context: int, num_tokens: int
) -> tuple[Floor, ...]:
    """Returns the floor of a greedy decode step for each of `BATCHES` that has room in `num_tokens` tokens of KV.

    Every row attends to `context` positions, its own included.
    """
    batches = [rows for rows in BATCHES if rows <= deployment.max_num_seqs and rows * context <= num_tokens]
    return tuple(_decode_floor(deployment, chip, findings, context, rows) for rows in batches)


def _decode_floor(deployment: Deployment, chip: Chip, findings: Findings, context: int, rows: int) -> Floor:
    seen = rows * sum(min(context, window or context) for window in deployment.spec.seen_windows)
    # Collectives carry the activations of each row, so their bytes are proportional to the rows.
    links = link_seconds(deployment, chip, findings.decode.collectives) * rows / findings.decode.num_rows
    parts = deployment.pipeline.num_microbatches(rows, rows)
    return _floor(deployment, chip, parts, num_tokens=rows, num_rows=rows, positions_read=seen, pairs=seen, links=links)


def prefill_floor(deployment: Deployment, chip: Chip, findings: Findings) -> Floor:
    """Returns the floor of the largest step, filled with the first tokens of one prompt."""
    tokens = deployment.max_num_batched_tokens
    pairs = sum(_pairs(tokens, window or tokens) for window in deployment.spec.seen_windows)
    read = tokens * len(deployment.spec.seen_windows)
    links = link_seconds(deployment, chip, findings.largest.collectives)
    parts = deployment.pipeline.num_microbatches(tokens, findings.largest.num_rows)
    return _floor(deployment, chip, parts, num_tokens=tokens, num_rows=1, positions_read=read, pairs=pairs, links=links)


def _floor(
    deployment: Deployment,
    chip: Chip,
    num_microbatches: int,
    *,
    num_tokens: int,
    num_rows: int,
    positions_read: int,
    pairs: int,
    links: float,
) -> Floor:
    rates, stages = StepRates.of(deployment, chip), deployment.stages
    # The last stage ends after so many ticks. In each of them a stage computes one microbatch with its own layers.
    ticks = num_microbatches + stages - 1
    tokens, each = num_tokens * ticks / num_microbatches, ticks / num_microbatches / stages
    memory = rates.memory(tokens, num_rows, positions_read * each, ticks)
    compute = rates.compute(tokens, num_rows, pairs * each)
    return Floor.of(num_tokens, memory=memory, compute=compute, links=links)


def link_seconds(deployment: Deployment, chip: Chip, collectives: Iterable[Collective]) -> float:
    """Returns the time of the collectives that greedy rows need.

    The chips of a stage form a ring, and so do those that have the same place in the replicas that share experts, and
    all chips where each token is sent only where it is wanted. The speed between the devices of one chip is not known,
    nor that between stages, which may be on different hosts.
    """
    in_ring = [each for each in collectives if deployment.stages == 1 or each.kind != "collective-permute"]
    seconds = 0.0
    rings = {
        MODEL: -(-deployment.size // chip.devices_per_chip),
        DATA: deployment.replicas,
        ALL_DEVICES: -(-deployment.mesh.num_devices // chip.devices_per_chip),
    }
    for axis, num_chips in rings.items():
        sent = sum(each.bytes_sent(num_chips) for each in in_ring if each.over == axis and not each.conditional)
        seconds += sent / chip.ring_bandwidth(num_chips) if sent else 0.0
    return seconds


def _pairs(tokens: int, window: int) -> int:
    """Counts the pairs of query and position: the query at position p sees min(p + 1, window) positions."""
    full = min(tokens, window)
    return full * (full + 1) // 2 + (tokens - full) * window
