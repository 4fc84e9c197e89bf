"""Scheduling policies as values. Each is a step in the history of LLM serving, kept runnable for comparison."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """Decides what may share a step, when a request may join, and how many pages it takes when it joins.

    `joins_running`: new requests join while others run; otherwise a batch is filled only when the last has ended.
    `mixes_phases`: one step may hold both decode tokens and prefill chunks; otherwise prefill steps come first.
    `reserves_limit`: a request takes pages for its largest possible length; otherwise for the tokens it has.
    """

    name: str
    joins_running: bool
    mixes_phases: bool
    reserves_limit: bool


POLICIES = {
    policy.name: policy
    for policy in (
        # Request-level batching, as FasterTransformer did: the batch ends when its longest member does.
        Policy("static", joins_running=False, mixes_phases=True, reserves_limit=True),
        # Iteration-level batching over whole-context reservations (Orca, OSDI 2022).
        Policy("continuous", joins_running=True, mixes_phases=True, reserves_limit=True),
        # Paged memory, prefill steps separate from decode steps (PagedAttention, SOSP 2023; vLLM V0).
        Policy("v0", joins_running=True, mixes_phases=False, reserves_limit=False),
        # Paged memory, chunked prefill and decode under one token budget (Sarathi-Serve, OSDI 2024; vLLM V1).
        Policy("v1", joins_running=True, mixes_phases=True, reserves_limit=False),
    )
}
