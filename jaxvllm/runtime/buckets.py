"""Buckets: the few shapes that steps are padded to, so that only these shapes are compiled."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from jaxvllm.core.step_plan import StepPlan


@dataclass(frozen=True, order=True)
class Bucket:
    """A compiled shape. With `num_tokens == num_rows` it is a decode bucket: every row has exactly one token.

    A decode bucket takes up to `width` decode steps in one call. With `num_drafts`, a row may have so many draft tokens
    after its last one, and each step yields up to one token more than that. If the bucket has fewer tokens than all of
    its rows could use, the step divides them (`runtime/draft_share.py`). A bucket that is split samples in a second
    program, as mixed buckets do, so that something may come between: masks, which rows wait for. In a blind one the
    proposer does not see what the model computes: it costs less where drafts do not pay. A plain one has no logit rules
    and reports no log-probabilities: it compiles sooner. Only an adapted one has tokens with adapters; its twin without
    costs what a step of an engine without room for adapters costs.
    """

    num_tokens: int
    num_rows: int
    width: int = 1
    is_split: bool = False
    num_drafts: int = 0  # of a row
    is_blind: bool = False
    is_plain: bool = False
    is_adapted: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.num_rows <= self.num_tokens:
            raise ValueError(f"a bucket needs 0 < rows <= tokens, got {self.num_rows} rows, {self.num_tokens} tokens")
        if self.width < 1 or (self.width > 1 and not self.is_decode):
            raise ValueError(f"a bucket needs a width of 1, or more for decode rows alone, got {self.width} for {self}")
        if self.is_split and self.num_tokens != self.num_rows:
            raise ValueError(f"every bucket with more tokens than rows is split: do not say so, got it for {self}")
        least, most = self.num_rows + self.num_drafts, self.num_rows * (1 + self.num_drafts)
        if self.num_drafts and not self.num_rows < least <= self.num_tokens <= most:
            raise ValueError(
                f"a row has one token and its drafts: {self.num_rows} rows with up to {self.num_drafts} drafts each "
                f"have {least} to {most} tokens, got {self.num_tokens}"
            )
        if self.is_blind and self.num_drafts:
            raise ValueError(f"what guesses must see the steps that it guesses for, got a blind bucket for {self}")
        if self.is_plain and (self.is_decode or self.is_split):
            raise ValueError(f"only a bucket for prompts is plain, got {self}")

    @property
    def is_decode(self) -> bool:
        """Whether it is one program, from the rows' last tokens to the next ones."""
        return (self.num_tokens == self.num_rows or self.num_drafts > 0) and not self.is_split

    @property
    def row_tokens(self) -> int:
        """The most tokens that a row of a decode bucket yields in one call."""
        return self.width * (1 + self.num_drafts)

    def holds(self, plan: StepPlan) -> bool:
        """Returns whether `plan` fits. A plan of decode rows fits every bucket that is large enough.

        A plan that is split does not fit a decode bucket: it needs a bucket that samples in a second program. A blind
        bucket takes only plans that may be blind, and a plain one those that are plain. Plans without adapters fit
        adapted buckets, too.
        """
        if plan.has_adapters and not self.is_adapted:
            return False
        if (self.is_blind and not plan.is_blind) or (self.is_plain and not plan.is_plain):
            return False
        if plan.num_drafts != self.num_drafts or plan.row_tokens > self.row_tokens:
            return False
        fits = plan.num_rows <= self.num_rows and plan.num_tokens <= self.num_tokens
        if self.is_split:
            return fits and plan.num_tokens == plan.num_rows
        return fits and (not self.is_decode or (plan.num_decode == plan.num_rows and not plan.is_split))

    def __str__(self) -> str:
        if self.is_adapted:
            return f"{replace(self, is_adapted=False)}, adapted"
        if self.num_drafts:
            if self.num_tokens < self.num_rows * (1 + self.num_drafts):
                room = self.num_tokens - self.num_rows
                return f"decode {self.num_rows} with {room} drafts, up to {self.num_drafts} each"
            return f"decode {self.num_rows} with {self.num_drafts} drafts each"
        ending = " that the proposer does not see" if self.is_blind else ""
        if self.num_tokens > self.num_rows:
            return f"{self.num_tokens} tokens x {self.num_rows} rows{ending}{', plain' if self.is_plain else ''}"
        return f"decode {self.num_rows}{' in two programs' if self.is_split else ''}{ending}"


@dataclass(frozen=True)
class DraftRoom:
    """The number of drafts that there may be, and the decode buckets that have them."""

    num_drafts: int = 0  # the most of a row in a step; 0: there is no proposer
    max_rows: int | None = None  # of a bucket with drafts; None: all decode buckets may have some
    on_demand: bool = False  # whether their buckets are compiled only when something asks for them
    sees_prompts: bool = False  # whether the proposer computes something of every step with prompts
    sees_decoding: bool = False  # and of every decode step without drafts

    @classmethod
    def where_they_pay(cls, num_drafts: int, overhead: int) -> "DraftRoom":
        """Makes room for drafts in steps of so few rows that they may pay: tokens would come 1.5 times as soon if all
        were right.

        `overhead` is what a step costs beside its tokens, in tokens, see `StepSizes`. A step of R rows and K drafts
        for each costs overhead + R (1 + K), one without drafts overhead + R.
        """
        each = 1 + num_drafts
        return cls(num_drafts, int(overhead * (each - _LEAST_GAIN) / (each * (_LEAST_GAIN - 1))), on_demand=True)

    @cached_property
    def kinds(self) -> tuple[tuple[int, int], ...]:
        """The kinds of steps with drafts: the most drafts of a row in each, and how many a row has on average.

        Beside the kind in which each row has all of its drafts there is one in which a row has half as many on average
        and one more at most, so that rows whose drafts are mostly right may have more than others. It pays where drafts
        are often wrong: one request at temperature 0.7 with `demo-medusa` got 3,640 tokens a second with up to two
        drafts, 3,100 with three and 3,060 without (two cores). Where most are right, all drafts or none are quickest.
        """
        k = self.num_drafts
        few = k // 2
        return ((k, k),) * (k > 0) + ((min(few + 1, k - 1), few),) * (few > 0)


NO_DRAFTS = DraftRoom()
# What drafts must be able to gain where nobody asked for them: half of them are wrong even in text that repeats itself.
_LEAST_GAIN = 1.5


@dataclass(frozen=True)
class BucketLadder:
    """The buckets of an engine, smallest first. The last one holds every plan that the scheduler can make.

    Beside them there is a `split` one for every decode bucket, which few plans need, and where there is a proposer, one
    with drafts, and a `blind` one for every bucket of which the proposer computes something. Where there is room for
    adapters, each has an adapted twin after it.
    """

    buckets: tuple[Bucket, ...]
    drafts: DraftRoom = NO_DRAFTS
    begins_plain: bool = True  # whether most requests have no logit rules

    @classmethod
    def build(
        cls,
        row_counts: Iterable[int],
        token_counts: Iterable[int],
        width: int = 1,
        drafts: DraftRoom = NO_DRAFTS,
        begins_plain: bool = True,
        has_lora: bool = False,
    ) -> "BucketLadder":
        """Makes a decode bucket for each of `row_counts`, and two mixed buckets for each of `token_counts`.

        The decode buckets take up to `width` steps in one call. One mixed bucket has few rows (at most 8), the other
        has many (half the tokens). There are no more because a row of a prefill step costs one LM head, little beside
        its tokens, and every bucket costs a compilation.
        """
        rows, tokens = sorted(set(row_counts)), sorted(set(token_counts))
        if not rows or not tokens or tokens[-1] < rows[-1]:
            raise ValueError(f"buckets need rows and at least as many tokens, got rows {rows} and tokens {tokens}")
        mixed = {Bucket(t, r) for t in tokens for most in (8, t // 2) if (r := _last(rows, most)) < t}
        # This bucket holds every plan. If it had as many tokens as rows, it would be a decode bucket: so it has a token
        # more.
        mixed.add(Bucket(max(tokens[-1], rows[-1] + 1), rows[-1]))
        buckets = [*(Bucket(r, r, width) for r in rows), *sorted(mixed)]
        if has_lora:
            buckets = [twin for bucket in buckets for twin in (bucket, replace(bucket, is_adapted=True))]
        return cls(tuple(buckets), drafts, begins_plain)

    @property
    def largest(self) -> Bucket:
        return self.buckets[-1]

    @cached_property  # asked before every step
    def first(self) -> Bucket:
        """The smallest bucket for plans of every kind."""
        adapted = self.largest.is_adapted
        return next(bucket for bucket in self.buckets if not bucket.is_decode and bucket.is_adapted == adapted)

    @cached_property
    def plain(self) -> Bucket:
        """The plain twin of the first."""
        return replace(self.first, is_plain=True)

    @property
    def earliest(self) -> Bucket:
        """The one that is compiled before any other: the plain one, or the first where few requests would take that."""
        return self.plain if self.begins_plain else self.first

    @cached_property  # asked before every step
    def widest(self) -> Bucket | None:
        """The decode bucket that holds every plan of decode rows, or None if there is no such bucket."""
        rows, adapted = self.largest.num_rows, self.largest.is_adapted
        return next((b for b in self.buckets if b.is_decode and b.num_rows == rows and b.is_adapted == adapted), None)

    @cached_property
    def split(self) -> tuple[Bucket, ...]:
        """The buckets that sample in a second program, one for every decode bucket.

        The largest, which holds all, comes first.
        """
        split = [replace(b, width=1, is_split=True) for b in self.buckets if b.is_decode]
        return (*split[-1:], *split[:-1])

    @cached_property
    def drafted(self) -> tuple[Bucket, ...]:
        """The drafted buckets: for every decode bucket that may have drafts, one of each number of drafts.

        The buckets with all drafts come first, beginning with the smallest, which gains most.
        """
        most = self.drafts.max_rows
        decode = [b for b in self.buckets if b.is_decode and (most is None or b.num_rows <= most)]
        return tuple(
            replace(b, num_tokens=b.num_rows + max(b.num_rows * average, k), num_drafts=k)
            for k, average in self.drafts.kinds
            for b in decode
        )

    @cached_property
    def blind(self) -> tuple[Bucket, ...]:
        """The blind twin of every bucket of which the proposer computes something."""
        drafts = self.drafts
        seen = (b for b in self.buckets if (drafts.sees_decoding if b.is_decode else drafts.sees_prompts))
        return tuple(replace(bucket, is_blind=True) for bucket in seen)

    def compile_order(self) -> tuple[Bucket, ...]:
        """Returns all buckets: the first, the largest, which holds every plan, the widest, and then the others."""
        early = dict.fromkeys([self.first, self.largest, *([] if self.widest is None else [self.widest])])
        return (*early, *(bucket for bucket in self.buckets if bucket not in early))

    def choose(self, plan: StepPlan, ready: Iterable[Bucket]) -> Bucket | None:
        """Returns the cheapest bucket of `ready` that holds `plan`, or None."""

        def cost(bucket: Bucket) -> tuple[int, int, bool, bool, bool, bool]:
            size = bucket.num_tokens, bucket.num_rows
            return *size, bucket.is_split, bucket.is_adapted, not bucket.is_blind, not bucket.is_plain

        return min((bucket for bucket in ready if bucket.holds(plan)), key=cost, default=None)


def _last(counts: list[int], most: int) -> int:
    """Returns the largest of the ascending `counts` that is at most `most`, or the smallest if all are larger."""
    return max((count for count in counts if count <= most), default=counts[0])


def row_counts(largest: int, platform: str) -> tuple[int, ...]:
    """Returns the row counts of the default decode buckets: powers of two, and on a CPU the middle between two from 16.

    There the time of a decode step grows with its rows: 32 ms for 16, 69 for 32, 170 for 64 (model S, two cores).
    Elsewhere it is that of reading the weights up to some 250 rows, so programs for more row counts gain nothing.

    A TPU has no step of one row, even if there is never more than one: libtpu expects it to take 2.4 times as long as
    one of two rows on v5e, and 2.8 times on v6e (Qwen3-4B, `benchmarks/step_estimate.py`).
    """
    least = 2 if platform == "tpu" else 1
    powers = powers_of_two(least, max(least, largest))
    middles = ((low + high) // 2 for low, high in pairwise(powers) if platform == "cpu" and low >= 16)
    return tuple(sorted({*powers, *middles}))


def powers_of_two(smallest: int, largest: int) -> tuple[int, ...]:
    """Returns `smallest`, its doublings below `largest`, and `largest`."""
    counts = []
    count = smallest
    while count < largest:
        counts.append(count)
        count *= 2
    return (*counts, largest)
