"""Log-probabilities of tokens as callers get them: with ranks, and with the text of each token."""

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.beam import Beam, Candidates
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.step_plan import TopLogprobs
from jaxvllm.engine.outputs import Logprob
from jaxvllm.text.tokenizer import Tokenizer


class TokenRanks:
    """Makes `Logprob`s of what a step reports. Each result has the token itself first."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer

    def spell(self, token_id: int) -> str | None:
        """Returns the text of a token. None: the engine has no tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def ranked(self, values: TopLogprobs, row: int, token_id: int, count: int) -> dict[int, Logprob]:
        """Returns the token first, as in vLLM, so that next(iter(...)) is the token; then the `count` best tokens."""
        ranked = {token_id: Logprob(float(values.token[row]), int(values.ranks[row]), self.spell(token_id))}
        best = zip(values.top_ids[row, :count].tolist(), values.top[row, :count].tolist(), strict=True)
        for rank, (token, value) in enumerate(best, 1):
            ranked[token] = Logprob(value, rank, self.spell(token))
        return ranked

    def chosen(self, values: NDArray[np.float32], token_id: int, params: SamplingParams) -> dict[int, Logprob]:
        """Returns the token first, then those that the caller named, or the best ones, of the values f32[V] of all."""
        if params.logprob_token_ids is None:
            best = Candidates.best(values, params.num_logprobs(len(values))).token_ids
            ranks = dict(zip(best.tolist(), range(1, len(best) + 1), strict=True))
        else:
            ranks = {one: int((values >= values[one]).sum()) for one in params.logprob_token_ids}
        ranks = {token_id: ranks.get(token_id) or int((values >= values[token_id]).sum())} | ranks
        return {one: Logprob(float(values[one]), rank, self.spell(one)) for one, rank in ranks.items()}

    def proposed(self, beam: Beam) -> dict[int, Logprob]:
        """Returns the token of `beam` first, then all that were proposed in its place, most likely first."""
        assert beam.candidates is not None, "a beam without a token has no log-probabilities"
        pairs = zip(beam.candidates.token_ids.tolist(), beam.candidates.logprobs.tolist(), strict=True)
        ranked = {token: Logprob(value, rank, self.spell(token)) for rank, (token, value) in enumerate(pairs, 1)}
        return {beam.token_id: ranked[beam.token_id]} | ranked
