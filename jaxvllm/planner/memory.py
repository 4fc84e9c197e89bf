"""Where the memory of one device goes, by the engine's own rules."""

from dataclasses import dataclass
from typing import Self

from jaxvllm.core.page_pool import pages_for
from jaxvllm.planner.job import Job
from jaxvllm.planner.target import CPU
from jaxvllm.runtime.memory import CPU_KV_LIMIT


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, which add up to `total` when the model fits, and what they hold of a replica's requests."""

    total: int
    weights: int
    step: int  # temporaries and outputs of the largest step
    kv: int  # pages
    unused: int  # beyond `memory_utilization`, or more than all requests could fill; negative: so much is missing
    num_tokens: int  # that the pages hold
    num_requests: int  # of `request_tokens` each
    request_tokens: int

    @classmethod
    def of(cls, job: Job, step_bytes: int, utilization: float, request_tokens: int) -> Self:
        """The share of each part when `utilization` of the device may be taken."""
        total, weights = job.target.memory_bytes, job.share.weight_bytes
        room = int(total * utilization) - weights - step_bytes
        if job.device == CPU:
            room = min(room, CPU_KV_LIMIT // (job.replicas * job.size))
        # As `runtime.memory.pages_that_fit`; page 0 is the trash page.
        num_pages = min(room // job.page_bytes, job.useful_pages) if room > 0 else 0
        usable = max(num_pages - 1, 0)
        kv = num_pages * job.page_bytes
        num_requests = usable // pages_for(request_tokens, job.page_size)
        missing = min(room - (pages_for(request_tokens, job.page_size) + 1) * job.page_bytes, 0)
        return cls(
            total=total,
            weights=weights,
            step=step_bytes,
            kv=kv,
            unused=missing or total - weights - step_bytes - kv,
            num_tokens=usable * job.page_size,
            num_requests=num_requests,
            request_tokens=request_tokens,
        )

    @property
    def fits(self) -> bool:
        """Whether at least one request has room."""
        return self.num_requests > 0
