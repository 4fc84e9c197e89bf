"""`Traffic`: decides when requests are sent."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Traffic:
    """The number of requests, their rate, and how many may run at a time."""

    num_prompts: int = 1000  # number of requests in all
    request_rate: float = math.inf  # requests per second; inf sends all at once
    burstiness: float = 1.0  # 1 is a Poisson process; below 1 requests come in bursts, above 1 more evenly (gamma)
    max_concurrency: int | None = None  # the most requests at a time; others wait in this program

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ValueError(f"--num-prompts must be at least 1, not {self.num_prompts}")
        if not self.request_rate > 0:
            raise ValueError(f"--request-rate must be above 0, or inf, not {self.request_rate}")
        if not 0 < self.burstiness < math.inf:
            raise ValueError(f"--burstiness must be a number above 0, not {self.burstiness}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"--max-concurrency must be at least 1, not {self.max_concurrency}")

    def arrivals(self, rng: np.random.Generator) -> list[float]:
        """Returns the seconds after the start at which each request is sent, ascending.

        Gaps are gamma distributed with shape `burstiness`. Their sum is scaled to exactly n/rate, as in vLLM.
        Otherwise the rate of a short run would be a few percent off, differently with every seed.
        """
        if math.isinf(self.request_rate):
            return [0.0] * self.num_prompts
        times = np.cumsum(rng.gamma(self.burstiness, size=self.num_prompts))
        times *= self.num_prompts / self.request_rate / times[-1]
        return [float(time) for time in times]
