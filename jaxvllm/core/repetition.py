"""Finds out when the end of an output is one pattern of tokens, several times in a row."""

from collections.abc import Sequence

import numpy as np

from jaxvllm.core.sampling_params import RepetitionDetectionParams


class RepetitionDetector:
    """Watches one output for `params`. A token costs O(max_pattern_size), however long the output is.

    For each size it counts the last tokens that equal the token `size` places before them. A pattern of that size
    occurs `min_count` times in a row as soon as this run is `size * (min_count - 1)` tokens long.
    """

    def __init__(self, params: RepetitionDetectionParams, max_tokens: int):
        """Prepares for an output of at most `max_tokens` tokens, in which larger patterns are never looked for."""
        largest = min(params.max_pattern_size, max_tokens // max(params.min_count, 1))
        self._sizes = np.arange(max(params.min_pattern_size, 1), largest + 1)
        self._needed = self._sizes * (params.min_count - 1)
        self._runs = np.zeros(len(self._sizes), np.int64)
        self._tokens = np.zeros(max_tokens, np.int64)
        self._num_tokens = 0

    def first_end(self, token_ids: Sequence[int], min_tokens: int) -> int | None:
        """Adds tokens to the output, and returns how many of them come before the first repetition's end, it included.

        None: no repetition ends within them. One that ends while the output has fewer than `min_tokens` tokens does
        not count. Tokens after an end are not added, as no caller gets them.
        """
        for index, token in enumerate(token_ids, 1):
            if self._add(token) and self._num_tokens >= min_tokens:
                return index
        return None

    def _add(self, token: int) -> bool:
        """Adds a token. Returns whether a repetition ends with it."""
        count = self._num_tokens
        self._tokens[count] = token
        self._num_tokens += 1
        has_partner = int(np.searchsorted(self._sizes, count, side="right"))  # sizes that reach no further back
        is_equal = self._tokens[count - self._sizes[:has_partner]] == token
        self._runs[:has_partner] = np.where(is_equal, self._runs[:has_partner] + 1, 0)
        return bool((self._runs >= self._needed).any())
