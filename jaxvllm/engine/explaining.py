"""The explanation of a completion that has ended: what each step did for it."""

import math
from collections.abc import Mapping
from itertools import islice, zip_longest

from jaxvllm.core.explanation import MAX_CANDIDATES, Explanation, OutputToken, PromptToken, TokenCandidate, Trail
from jaxvllm.engine.live_request import LiveCompletion, LiveRequest
from jaxvllm.engine.outputs import Logprob
from jaxvllm.engine.token_ranks import TokenRanks


def explain(live: LiveRequest, completion: LiveCompletion, trail: Trail, ranks: TokenRanks) -> Explanation:
    """Returns the explanation of a completion, whose steps are its `trail`."""
    tokens = [
        OutputToken(
            token_id,
            ranks.spell(token_id),
            trail.origin(index),
            _candidates(logprobs or {}),
        )
        for index, (token_id, logprobs) in enumerate(zip_longest(completion.token_ids, completion.logprobs))
    ]
    metrics = live.metrics
    return Explanation(
        request_id=live.request.request_id,
        prompt=tuple(PromptToken(one, ranks.spell(one)) for one in live.request.prompt.token_list),
        tokens=tuple(tokens),
        steps=tuple(trail.steps),
        num_steps_left_out=trail.num_left_out,
        page_size=trail.page_size,
        num_groups=trail.num_groups,
        vocab_size=trail.vocab_size,
        finish_reason=None if completion.finish_reason is None else completion.finish_reason.value,
        stop_reason=completion.stop_reason,
        queued_seconds=metrics.queued_seconds,
        first_token_seconds=metrics.first_token_seconds,
        total_seconds=metrics.total_seconds,
    )


def _candidates(logprobs: Mapping[int, Logprob]) -> tuple[TokenCandidate, ...]:
    """Returns the chosen token, which is the first of `logprobs`, and the best of those that could have come."""
    could = (item for index, item in enumerate(logprobs.items()) if not index or item[1].logprob > -math.inf)
    return tuple(
        TokenCandidate(one, ranked.decoded_token, ranked.logprob, ranked.rank)
        for one, ranked in islice(could, 1 + MAX_CANDIDATES)
    )
