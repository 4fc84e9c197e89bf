"""`StepSizes`: how large a step should be, given the few sizes that steps are padded to."""

from collections.abc import Sequence
from dataclasses import dataclass

# What a step costs beside its tokens, in tokens: see `StepSizes`. With weights of two bytes it is FLOP/s over bytes/s:
# 206 on an H200, 241 on a v5e, 560 on a v6e. On two cores, a step of model S took 4 ms, and 0.9 ms more a token.
STEP_OVERHEAD = 256
STEP_OVERHEAD_ON_CPU = 5


def step_overhead(on_cpu: bool) -> int:
    """Returns what a step costs beside its tokens, in tokens."""
    return STEP_OVERHEAD_ON_CPU if on_cpu else STEP_OVERHEAD


@dataclass(frozen=True)
class StepSizes:
    """The sizes of compiled steps with prompts, as (tokens, rows), and what any step costs beside its tokens.

    `overhead` is in tokens: a step of n tokens takes as long as n + `overhead` tokens of a large step. Reading the
    weights is most of that, so it is some 250 on accelerators (their FLOP/s over their bytes/s) and 5 on CPUs.
    """

    sizes: Sequence[tuple[int, int]]
    overhead: int

    def prompt_tokens(self, num_decode: int, num_prompt: int, num_rows: int) -> int:
        """Returns how many of the next `num_prompt` tokens of prompts to compute beside `num_decode` decode rows.

        That is all of them, unless it is quicker to fill a smaller size and to compute the rest in the step after:
        then it is as many as fill that size. With prompts the step has `num_rows` rows. There is at least one token.
        """
        total = num_decode + num_prompt
        whole = self._padded(total, num_rows)
        smaller = [tokens for tokens, rows in self.sizes if num_decode < tokens < total and rows >= num_rows]
        if whole is None or not smaller:
            return num_prompt
        size = max(smaller)
        # The rows that decode are in both steps, and the second time they are no waste: they yield another token.
        rest = self._padded(total - size + num_decode, num_rows)
        assert rest is not None, "it is no larger than the whole"
        if size + self.overhead + (rest - num_decode) < whole:
            return size - num_decode
        return num_prompt

    def _padded(self, num_tokens: int, num_rows: int) -> int | None:
        """Returns the tokens of the smallest size that holds so many tokens and rows; None if there is none."""
        return min([tokens for tokens, rows in self.sizes if tokens >= num_tokens and rows >= num_rows], default=None)
