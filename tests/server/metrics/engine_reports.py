"""What an engine of 80 pages tells of itself, and the time at which it does."""

from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.stats import EngineStats, StepReport
from jaxvllm.worker import wire

FACTS = wire.EngineFacts(
    tokenizer_directory=None,
    vocab_size=300,
    max_model_len=300,
    eos_token_ids=(2,),
    default_params=SamplingParams(),
    num_replicas=1,
    num_pages=80,
    page_size=16,
    max_num_seqs=4,
)
IDLE = EngineStats(
    num_steps=0,
    num_prompt_tokens=0,
    num_output_tokens=0,
    num_preemptions=0,
    num_prefix_queries=0,
    num_prefix_hits=0,
    num_external_queries=0,
    num_external_hits=0,
    num_failed_loads=0,
    num_saved_pages=0,
    num_running=0,
    num_waiting=0,
    num_pages=80,
    num_pages_owned=0,
    num_programs=0,
    num_bucket_tokens=0,
    num_padding_tokens=0,
    num_ended_tokens=0,
    num_bucket_rows=0,
    num_padding_rows=0,
)
STEP = StepReport(
    replica=0,
    num_decode=3,
    num_prefill=9,
    num_rows=4,
    bucket_tokens=16,
    num_steps=1,
    num_drafts=0,
    host_seconds=0.0005,
    device_seconds=0.02,
    launch_seconds=0.0003,
    was_awaited=True,
)


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now
