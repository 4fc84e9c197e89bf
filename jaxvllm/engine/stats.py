"""Numbers that say how busy an engine is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Self


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was built and current gauges, summed over all replicas."""

    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_prefix_queries: int  # prompt tokens that were looked up in the prefix cache
    num_prefix_hits: int  # looked-up tokens that the prefix cache had
    num_external_queries: int  # prompt tokens beyond the prefix cache that a KV connector was asked for
    num_external_hits: int  # those of them that came
    num_failed_loads: int  # requests for which a connector brought fewer pages than it had promised
    num_saved_pages: int  # pages that a connector keeps or kept
    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_owned: int
    num_programs: int  # compiled so far
    num_bucket_tokens: int  # tokens that steps computed, padding included
    num_padding_tokens: int  # those of them that only filled up a bucket
    num_ended_tokens: int  # those of rows that had ended: the host learns of an end one step late, or after a burst
    num_bucket_rows: int  # rows of the same steps, padding included
    num_padding_rows: int
    num_verifications: int = 0  # times that a row's next token was computed with draft tokens after it
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # draft tokens that were what was sampled
    num_accepted_per_pos: tuple[int, ...] = ()  # the same by their position among the drafts of a row
    num_expert_placements: int = 0  # times that experts of a layer were moved by load
    mean_expert_load: int = 0  # of a device in what was measured to move them, in tokens that chose an expert
    most_expert_load: int = 0  # the same of the busiest device of each layer
    max_loras: int = 0  # adapters that each replica has room for; 0: there are none
    running_adapters: tuple[str, ...] = ()  # the names of those that running requests have
    waiting_adapters: tuple[str, ...] = ()  # and that waiting ones have

    @classmethod
    def summed(cls, stats: Sequence[Self]) -> Self:
        """Returns the counters and gauges of several engines together."""
        others = {"num_accepted_per_pos", "max_loras", "running_adapters", "waiting_adapters"}
        names = [field.name for field in fields(cls) if field.name not in others]
        most = max(len(one.num_accepted_per_pos) for one in stats)
        padded = [(*one.num_accepted_per_pos, *[0] * (most - len(one.num_accepted_per_pos))) for one in stats]
        return cls(
            **{name: sum(getattr(one, name) for one in stats) for name in names},
            max_loras=max(one.max_loras for one in stats),
            running_adapters=_union(one.running_adapters for one in stats),
            waiting_adapters=_union(one.waiting_adapters for one in stats),
            num_accepted_per_pos=tuple(map(sum, zip(*padded, strict=True))),
        )


def _union(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted(set(chain.from_iterable(names))))


@dataclass(frozen=True)
class StepReport:
    """Measurements of one call of a step's program by one replica, taken when its output was read.

    A call takes `num_steps` decode steps. Numbers of tokens are those of each step, and times those of all together.
    """

    replica: int
    num_decode: int  # decode tokens, which is also the number of decode rows: each has one token
    num_prefill: int  # prompt tokens
    num_rows: int
    num_steps: int
    num_drafts: int  # that a row may have had in a step
    bucket_tokens: int  # tokens that were computed, padding included
    host_seconds: float  # time to plan and launch the step and to turn its tokens into outputs
    device_seconds: float  # from its launch, or the end of the call before it, until its output was seen
    launch_seconds: float  # part of `host_seconds`: to plan and launch the step
    was_awaited: bool  # the host waited for its output, and so saw when the device was done
