"""Buckets: the few shapes that steps are padded to, so that each is compiled once."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxvllm.core.plan import StepPlan


@dataclass(frozen=True, order=True)
class Bucket:
    """A compiled shape. With `num_tokens == num_rows` it is a decode bucket: every row has exactly one token."""

    num_tokens: int
    num_rows: int

    def __post_init__(self) -> None:
        if not 0 < self.num_rows <= self.num_tokens:
            raise ValueError(f"a bucket needs 0 < rows <= tokens, got {self.num_rows} rows, {self.num_tokens} tokens")

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_rows

    def holds(self, plan: StepPlan) -> bool:
        """Whether `plan` fits; a plan of decode rows fits every bucket that is large enough."""
        fits = plan.num_rows <= self.num_rows and plan.num_tokens <= self.num_tokens
        return fits and (not self.is_decode or plan.num_decode == plan.num_rows)

    def __str__(self) -> str:
        return f"decode {self.num_rows}" if self.is_decode else f"{self.num_tokens} tokens x {self.num_rows} rows"


@dataclass(frozen=True)
class BucketLadder:
    """All buckets of an engine, smallest first. The last holds every plan that the scheduler can make."""

    buckets: tuple[Bucket, ...]

    @classmethod
    def build(cls, row_counts: Iterable[int], token_counts: Iterable[int]) -> "BucketLadder":
        """Decode buckets of each of `row_counts`, and mixed ones of `token_counts` with few rows and with many.

        Few is at most 8, many half the tokens: a row of a prefill step costs one LM head, little beside its tokens,
        and every bucket costs a compilation.
        """
        rows, tokens = sorted(set(row_counts)), sorted(set(token_counts))
        if not rows or not tokens or tokens[-1] < rows[-1]:
            raise ValueError(f"buckets need rows and at least as many tokens, got rows {rows} and tokens {tokens}")
        mixed = {Bucket(t, r) for t in tokens for most in (8, t // 2) if (r := _last(rows, most)) < t}
        # This one holds everything. With as many rows as tokens, a spare token keeps it from being a decode bucket.
        mixed.add(Bucket(max(tokens[-1], rows[-1] + 1), rows[-1]))
        return cls((*(Bucket(r, r) for r in rows), *sorted(mixed)))

    @property
    def largest(self) -> Bucket:
        return self.buckets[-1]

    def compile_order(self) -> tuple[Bucket, ...]:
        """The largest bucket first, since it holds every plan; then the largest for decoding, which is most steps."""
        most_rows = Bucket(self.largest.num_rows, self.largest.num_rows)
        first = [bucket for bucket in (self.largest, most_rows) if bucket in self.buckets]
        return (*first, *(bucket for bucket in self.buckets if bucket not in first))

    def choose(self, plan: StepPlan, ready: Iterable[Bucket]) -> Bucket | None:
        """The cheapest bucket of `ready` that holds `plan`."""
        return min((bucket for bucket in ready if bucket.holds(plan)), default=None)


def _last(counts: list[int], most: int) -> int:
    """The largest of the ascending `counts` that is at most `most`, else the smallest of all."""
    return max((count for count in counts if count <= most), default=counts[0])


def powers_of_two(smallest: int, largest: int) -> tuple[int, ...]:
    """`smallest`, its doublings below `largest`, and `largest`."""
    counts = []
    count = smallest
    while count < largest:
        counts.append(count)
        count *= 2
    return (*counts, largest)
