"""How busy an engine is, in numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was built, and gauges of now, over all replicas."""

    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_prefix_queries: int  # tokens of prompts that were looked for in the prefix cache
    num_prefix_hits: int  # those of them that were there
    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_owned: int
    num_programs: int  # compiled so far


@dataclass(frozen=True)
class StepReport:
    """One step of one replica, when its output was read."""

    replica: int
    num_decode: int  # tokens, and rows: a decode row has one
    num_prefill: int  # tokens of prompts
    num_rows: int
    bucket_tokens: int  # what was computed, padding included
    bucket_rows: int
    host_seconds: float  # planning and launching it, and what its tokens took to become outputs
    device_seconds: float  # from its launch, or the end of the one before it, until its output was seen
