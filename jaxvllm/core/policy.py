"""Scheduling policies, as values. Each is a step of the field's history and stays runnable for comparison."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """What may share a step, when a request may join, and how many pages it takes on joining.

    `joins_running`: new requests join while others run, else a batch is filled only when the last has ended.
    `mixes_phases`: one step may hold both decode tokens and prefill chunks, else prefill steps come first.
    `reserves_limit`: a request takes pages for the longest it may become, else for the tokens it has.
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
        # Paged, prefill steps apart from decode steps (PagedAttention, SOSP 2023; vLLM V0).
        Policy("v0", joins_running=True, mixes_phases=False, reserves_limit=False),
        # Paged, chunked prefill packed beside decode under one token budget (Sarathi-Serve, OSDI 2024; vLLM V1).
        Policy("v1", joins_running=True, mixes_phases=True, reserves_limit=False),
    )
}
