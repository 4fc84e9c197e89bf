"""`Traffic`: decides when requests are sent."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from jaxvllm.ranges import Count, Range, check_ranges

# A gap between requests is gamma distributed. With a shape b it is less than 1e-308, the smallest double, with a
# probability of about 1e-308**b: 4e-16 for 0.05, and 0.5 for 0.001, where all gaps of a short run may be 0, and so may
# their sum, by which they are divided.
Burstiness = Annotated[float, Range(0.05, 1e6)]
Rate = Annotated[float, Range(1e-6, math.inf)]


@dataclass(frozen=True)
class Traffic:
    """The number of requests, their rate, and how many may run at a time."""

    num_prompts: Count = 1000  # number of requests in all
    request_rate: Rate = math.inf  # requests per second; inf sends all at once
    burstiness: Burstiness = 1.0  # 1 is a Poisson process; below 1 requests come in bursts, above 1 more evenly (gamma)
    max_concurrency: Count | None = None  # the most requests at a time; others wait in this program

    def __post_init__(self) -> None:
        check_ranges(self)

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
