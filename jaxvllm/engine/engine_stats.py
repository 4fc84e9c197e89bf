"""Adds up what the replicas of an engine have counted."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxvllm.engine.expert_balancer import ExpertBalancer
from jaxvllm.engine.replica import Replica
from jaxvllm.engine.stats import EngineStats
from jaxvllm.runtime.runner import Runner


def engine_stats(
    replicas: Sequence[Replica],
    holders: Sequence[Runner],
    balancers: Sequence[ExpertBalancer],
    adapters: Mapping[str, Any],
    num_prompt_tokens: int,
) -> EngineStats:
    """Returns counters and gauges of all replicas together.

    `adapters` is what `EngineAdapters.stats` tells, and `num_prompt_tokens` counts those of requests so far.
    """
    schedulers = [replica.scheduler for replica in replicas]
    traffics = [replica.traffic for replica in replicas if replica.traffic is not None]
    drafted = np.sum([replica.num_drafted for replica in replicas], axis=0)
    accepted = np.sum([replica.num_accepted for replica in replicas], axis=0)
    return EngineStats(
        num_steps=sum(replica.num_steps for replica in replicas),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=sum(replica.num_output_tokens for replica in replicas),
        num_preemptions=sum(scheduler.num_preemptions for scheduler in schedulers),
        num_prefix_queries=sum(replica.num_prefix_queries for replica in replicas),
        num_prefix_hits=sum(replica.num_prefix_hits for replica in replicas),
        num_external_queries=sum(s.num_asked_pages * s.cache.page_size for s in schedulers),
        num_external_hits=sum(s.num_loaded_pages * s.cache.page_size for s in schedulers),
        num_failed_loads=sum(traffic.num_failed_loads for traffic in traffics),
        num_saved_pages=sum(traffic.num_saved_pages for traffic in traffics),
        num_running=sum(scheduler.num_running for scheduler in schedulers),
        num_waiting=sum(scheduler.num_waiting for scheduler in schedulers),
        num_pages=sum(scheduler.cache.num_pages for scheduler in schedulers),
        num_pages_owned=sum(scheduler.cache.num_owned for scheduler in schedulers),
        num_programs=sum(holder.programs.num_compiled for holder in holders),
        num_bucket_tokens=sum(replica.num_bucket_tokens for replica in replicas),
        num_padding_tokens=sum(replica.num_padding_tokens for replica in replicas),
        num_ended_tokens=sum(replica.num_ended_tokens for replica in replicas),
        num_bucket_rows=sum(replica.num_bucket_rows for replica in replicas),
        num_padding_rows=sum(replica.num_padding_rows for replica in replicas),
        num_verifications=int(drafted[:1].sum()),
        num_draft_tokens=int(drafted.sum()),
        num_accepted_tokens=int(accepted.sum()),
        num_accepted_per_pos=tuple(accepted.tolist()),
        num_expert_placements=sum(balancer.num_placements for balancer in balancers),
        mean_expert_load=round(sum(balancer.mean_load for balancer in balancers)),
        most_expert_load=round(sum(balancer.most_load for balancer in balancers)),
        **adapters,
    )
