"""Chooses the block sizes of the TPU kernel, by a model of VMEM, latency and bandwidth or a table of measured sizes."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.chips import TpuChip

# The stages are for rows with one query, with a few (drafts to verify), and with many.
type Stage = Literal["decode", "verify", "prefill"]

LANES = 128
TUNED_FILE = Path(__file__).with_name("tuned.json")

# The approximate time from asking for a page to having it. The bytes that the bandwidth carries in it should be in
# flight.
DMA_LATENCY = 2e-6
# The most queries that count as a few. A tile of 16 is the least of which 16-bit registers hold whole heads.
VERIFY_QUERIES = 16
# Rows of a KV head's query tile in prefill. A page then serves 512 FLOP per byte, about what v6e needs (560 FLOP/s per
# byte/s) and twice what v5e does, and what a step costs per row is spread over enough keys.
TILE_ROWS = 512
# Keys in one step of the online softmax.
STEP_TOKENS = 512
# One query's rows are few, so that a step of few heads would be all overhead: at least this many tokens times heads.
DECODE_STEP_TOKENS = 4096
# The share of VMEM that each stage's buffers may take. The rest is for the writer and the compiler.
VMEM_SHARES: dict[Stage, float] = {"decode": 0.2, "verify": 0.15, "prefill": 0.4}
WRITER_SHARE = 0.1


@dataclass(frozen=True)
class Problem:
    """The facts on which the best sizes depend, besides the chip."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    dtype: str  # of the queries
    kv_dtype: str  # of the pages
    latent_size: int | None = None  # of values that are the end of their keys
    by_token: bool = False  # whether each token has scales of its own

    def part(self, blocks: "Blocks") -> "Problem":
        """Returns what is attended at a time: one part of the query heads, which all have one KV head."""
        parts = blocks.head_parts
        assert parts == 1 or (self.num_kv_heads == 1 and self.num_heads % parts == 0), (self, blocks)
        return replace(self, num_heads=self.num_heads // blocks.head_parts)

    @property
    def group(self) -> int:
        """The number of query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def width(self) -> int:
        """The columns of a page row."""
        return 2 * self.head_size if self.latent_size is None else self.head_size

    @property
    def value_size(self) -> int:
        """The last columns of a page row, which are the value."""
        return self.head_size if self.latent_size is None else self.latent_size

    @property
    def key_columns(self) -> int:
        """The columns of a page row that are multiplied by queries: the keys, up to whole registers of 128 lanes.

        With heads of 64 these include the values, which meet zeros in the queries. This costs no more than keys alone.
        """
        return -(-self.head_size // LANES) * LANES

    @property
    def value_columns(self) -> int:
        """The columns of a page row that are multiplied by weights, from the register on in which values begin."""
        return self.width - (self.width - self.value_size) // LANES * LANES

    @property
    def num_scales(self) -> int:
        """The scales that a token has of its own for each KV head, if it has some."""
        return 2 if self.latent_size is None else 1

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's keys and values, with its scales, which fill up lanes."""
        of_scales = 4 * max(self.num_scales, LANES // self.page_size) if self.by_token else 0
        return self.num_kv_heads * (self.width * jnp.dtype(self.kv_dtype).itemsize + of_scales)


@dataclass(frozen=True)
class Blocks:
    """The sizes of one stage. Raises ValueError for sizes that do not fit each other."""

    tile_queries: int  # of one row, attended together
    fetch_pages: int  # copied and waited for together
    step_pages: int  # in one step of the online softmax
    slots: int  # fetches in VMEM: one attended to, the others on their way
    head_parts: int = 1  # of the query heads of the only KV head, each of which reads the pages for itself

    def __post_init__(self) -> None:
        if self.tile_queries < 1 or self.tile_queries & (self.tile_queries - 1) or self.slots < 2:
            raise ValueError(f"{self}: a tile must be a power of two, and slots at least two")
        if self.step_pages < 1 or self.fetch_pages < 1 or self.fetch_pages % self.step_pages:
            raise ValueError(f"{self}: fetch_pages must be a multiple of step_pages")
        if self.head_parts < 1 or self.head_parts & (self.head_parts - 1) or self.head_parts > self.tile_queries:
            raise ValueError(f"{self}: head_parts must be a power of two, at most tile_queries")

    def tile_rows(self, problem: Problem) -> int:
        """Returns the rows of a KV head's query tile: its query heads times the queries, up to whole registers."""
        return -(-problem.part(self).group * self.tile_queries // 8) * 8

    def vmem_bytes(self, problem: Problem) -> int:
        """Returns the VMEM of the stage: pages, queries, outputs, the softmax of all heads, and one head's logits."""
        width, itemsize = problem.key_columns, jnp.dtype(problem.dtype).itemsize
        queries = self.tile_queries * -(-problem.part(self).num_heads // 8) * 8 * width
        rows = problem.num_kv_heads * self.tile_rows(problem)
        # These are logits, weights in two dtypes, and the distances for the mask.
        logits = 4 * 4 * self.tile_rows(problem) * self.step_pages * problem.page_size
        return (
            self.slots * self.fetch_pages * problem.page_size * problem.token_bytes
            + (self.slots + 2) * max(queries, 16 * width) * itemsize
            + 4 * rows * (width + 2 * LANES + problem.value_columns)
            + logits
        )


def choose(stage: Stage, problem: Problem, chip: TpuChip) -> Blocks:
    """Returns the measured best sizes for this problem on this chip, or else those of the model."""
    return tuned_table(TUNED_FILE).get((stage, problem, chip.name)) or model(stage, problem, chip)


def model(stage: Stage, problem: Problem, chip: TpuChip) -> Blocks:
    """Returns sizes that fit VMEM, feed the matrix units, and keep a latency's worth of bytes in flight.

    Raises NotImplementedError when even the smallest sizes do not fit.
    """
    if stage == "decode":
        tile, slots = 1, 3
        step_tokens = min(max(DECODE_STEP_TOKENS // problem.num_kv_heads, STEP_TOKENS), 2048)
    else:
        tile = VERIFY_QUERIES
        if stage == "prefill":
            tile = min(max(_power_of_two(TILE_ROWS // problem.group), 2 * VERIFY_QUERIES), 256)
        slots, step_tokens = 2, STEP_TOKENS
    step = _power_of_two(step_tokens // problem.page_size)
    in_flight = chip.hbm_bandwidth / chip.num_cores * DMA_LATENCY / (slots - 1)
    steps = max(1, round(in_flight / (step * problem.page_size * problem.token_bytes)))
    blocks = Blocks(tile, step * steps, step, slots)
    while blocks.vmem_bytes(problem) > VMEM_SHARES[stage] * chip.vmem_bytes:
        blocks = _smaller(blocks, problem)
    return blocks


def write_tokens(problem: Problem, chip: TpuChip) -> int:
    """Returns how many positions are written together: whole pages, at least one, and at most 128 tokens."""
    tokens = LANES
    while tokens > problem.page_size and 6 * tokens * problem.token_bytes > WRITER_SHARE * chip.vmem_bytes:
        tokens //= 2
    return tokens


def _smaller(blocks: Blocks, problem: Problem) -> Blocks:
    """Returns the next smaller sizes: it first fetches less ahead, then takes a smaller tile, of fewer queries and then
    of fewer heads, then smaller steps."""
    if (steps := blocks.fetch_pages // blocks.step_pages) > 1:
        return replace(blocks, fetch_pages=blocks.step_pages * (steps // 2))
    if blocks.tile_queries > VERIFY_QUERIES:
        return replace(blocks, tile_queries=blocks.tile_queries // 2)
    # More than TILE_ROWS keep the matrix units busy for longer than a page takes to come, so it may come once for each
    # part of them. Parts are copied as whole registers of 16 heads.
    heads = problem.part(blocks).num_heads
    is_divisible = problem.num_kv_heads == 1 and heads % 32 == 0
    if blocks.tile_rows(problem) > TILE_ROWS and blocks.tile_queries > 1 and is_divisible:
        return replace(blocks, head_parts=2 * blocks.head_parts)
    if blocks.step_pages * problem.page_size > LANES:
        return replace(blocks, fetch_pages=blocks.step_pages // 2, step_pages=blocks.step_pages // 2)
    raise NotImplementedError(
        f"the tpu kernel's smallest blocks for {problem} do not fit VMEM: shard the heads over more devices, or use "
        "the backend reference"
    )


def _power_of_two(n: int) -> int:
    """Returns the largest power of two that is not above n."""
    return 1 << (max(n, 1).bit_length() - 1)


@cache
def tuned_table(file: Path) -> dict[tuple[Stage, Problem, str], Blocks]:
    """Reads the sizes that were measured to be best, by stage, problem and the chip's name.

    The file is a JSON list; each entry has the keys stage, chip, problem (the fields of `Problem`) and blocks (the
    fields of `Blocks`). Raises ValueError for an entry of another form.
    """
    table = {}
    for entry in json.loads(file.read_text()):
        try:
            table[entry["stage"], Problem(**entry["problem"]), entry["chip"]] = Blocks(**entry["blocks"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file}: {entry} must have stage, chip, problem and blocks, all complete") from error
    return table
