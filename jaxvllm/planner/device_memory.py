"""Divides the memory of one device by the engine's own rules."""

from dataclasses import dataclass
from typing import Self

from jaxvllm.planner.deployment import Deployment
from jaxvllm.planner.target import CPU
from jaxvllm.runtime.memory import CPU_KV_LIMIT, count_pages
from jaxvllm.runtime.state import state_bytes


@dataclass(frozen=True)
class Memory:
    """The bytes of one device, which add up to `total` when the model fits, and the requests that they hold."""

    total: int
    weights: int
    state: int  # what the device keeps for every slot
    step: int  # temporaries and outputs of the largest step
    kv: int  # pages
    unused: int  # beyond `memory_utilization`, or more than all requests could fill; negative: bytes that are missing
    num_tokens: int  # that the pages hold; those of windowed groups hold the last tokens of each request
    num_requests: int  # of `request_tokens` each
    request_tokens: int

    @classmethod
    def of(cls, deployment: Deployment, step_bytes: int, utilization: float, request_tokens: int) -> Self:
        """Computes the size of each part when `utilization` of the device may be taken."""
        total, weights = deployment.target.memory_bytes, deployment.share.weight_bytes
        room = int(total * utilization) - weights - step_bytes
        if deployment.device == CPU:
            room = min(room, CPU_KV_LIMIT // deployment.mesh.num_devices)
        state = state_bytes(deployment.cache_shape(1).sizes(deployment.spec))
        room -= state
        # This is the rule of `runtime.memory.pages_that_fit`; page 0 is the trash page.
        num_pages = count_pages(room, deployment.pool_bytes, deployment.useful_pages)
        usable = max(num_pages - 1, 0)
        kv = deployment.pool_bytes(num_pages) if num_pages else 0
        shape = deployment.cache_shape(max(num_pages, 1))
        num_requests = shape.num_requests(deployment.spec, request_tokens)
        missing = min(room - deployment.pool_bytes(shape.pages_of(deployment.spec, request_tokens) + 1), 0)
        return cls(
            total=total,
            weights=weights,
            state=state,
            step=step_bytes,
            kv=kv,
            unused=missing or total - weights - state - step_bytes - kv,
            num_tokens=usable * deployment.page_size,
            num_requests=num_requests,
            request_tokens=request_tokens,
        )

    @property
    def fits(self) -> bool:
        """Whether at least one request has room."""
        return self.num_requests > 0
