"""`RooflineCost`: the times of steps on devices that are not here, by the planner's roofline."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import jax.numpy as jnp

from jaxvllm.planner.deployment import Deployment
from jaxvllm.planner.hlo import Collective
from jaxvllm.planner.roofline import StepRates, link_seconds
from jaxvllm.simulator.step_cost import StepWork

# Measured without a device and without jax's own dispatch, so that it is a floor like the roofline: 65 us to plan a
# step, 0.76 us for each row whose tokens are streamed, and 80 us for a request
# (benchmarks/results/host_step-2026-11-22-ef42053.json).
HOST_STEP_SECONDS = 65e-6
HOST_ROW_SECONDS = 0.76e-6
HOST_REQUEST_SECONDS = 80e-6


@dataclass(frozen=True)
class RooflineCost:
    """Steps as quick as the published rates of a chip allow, or as quick as a share of these rates.

    With an `efficiency` of 1 it is a floor, which no device reaches.
    """

    rates: StepRates
    windows: Mapping[int | None, int]  # layers by the positions that they see
    link_seconds: float  # of one token's activations
    efficiency: float = 1.0  # share of the published rates
    host_step_seconds: float = HOST_STEP_SECONDS
    host_row_seconds: float = HOST_ROW_SECONDS
    request_seconds: float = HOST_REQUEST_SECONDS
    jitter: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"--efficiency must be above 0 and at most 1, not {self.efficiency}")

    @classmethod
    def of(cls, deployment: Deployment, efficiency: float = 1.0) -> Self:
        """Raises ValueError for a device whose rates are not known."""
        chip = deployment.target.chip
        if chip is None:
            raise ValueError(
                f"the rates of device {deployment.device} are not known: name a chip such as h100, or measure a table "
                "with `jaxvllm bench steps` on a machine that has the device, and give it as --table"
            )
        spec = deployment.spec
        # Without compiling: two sums over the devices in each layer, and one of the embedding. The planner finds the
        # same 2 L + 1 all-reduces in the compiled step of Llama-3.1-8B.
        num_bytes = spec.hidden_size * jnp.dtype(deployment.dtype).itemsize
        collectives = [Collective("all-reduce", 2 * spec.num_layers + 1, num_bytes, False)] * (deployment.size > 1)
        rates = StepRates.of(deployment, chip)
        windows = Counter(deployment.spec.seen_windows)
        return cls(rates, windows, link_seconds(deployment, chip, collectives), efficiency)

    def device_seconds(self, work: StepWork) -> float:
        bucket, num_tokens = work.bucket, work.num_tokens
        read = sum([layers * work.positions(window) for window, layers in self.windows.items()])
        pairs = read  # of rows with one query
        if num_tokens > len(work.starts):
            pairs = sum([layers * work.pairs(window) for window, layers in self.windows.items()])
        memory = self.rates.memory(num_tokens, bucket.num_rows, read)
        compute = self.rates.compute(bucket.num_tokens, bucket.num_rows, pairs)
        seconds = max(memory, compute) + bucket.num_tokens * self.link_seconds
        return work.num_steps * seconds / self.efficiency

    def launch_seconds(self, work: StepWork) -> float:
        return self.host_step_seconds

    def read_seconds(self, work: StepWork) -> float:
        return self.host_row_seconds * len(work.starts) * work.num_steps

    def with_host(self, step_seconds: float) -> Self:
        """Returns the same device beside a host that takes so long for a step."""
        return replace(self, host_step_seconds=step_seconds, host_row_seconds=0.0)
