"""The drafts of an engine in this process, between two moments."""

from jaxvllm.bench.drafts import DraftTotals
from jaxvllm.engine.stats import EngineStats


def drafts_between(before: EngineStats, after: EngineStats) -> DraftTotals:
    """Returns the drafts that `after` counts and `before` does not."""
    return _drafts(after).since(_drafts(before))


def _drafts(stats: EngineStats) -> DraftTotals:
    return DraftTotals(
        drafts=stats.num_verifications,
        draft_tokens=stats.num_draft_tokens,
        accepted_tokens=stats.num_accepted_tokens,
        accepted_per_pos=stats.num_accepted_per_pos,
    )
