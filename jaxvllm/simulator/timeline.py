"""`LoadTimeline`: how full an engine was over time, in as many samples as a picture needs."""

from dataclasses import dataclass

_MOST = 4096  # samples; when there are so many, every other one is dropped


@dataclass(frozen=True)
class EngineLoad:
    """The requests and pages of an engine at a moment."""

    at: float  # seconds
    kv_share: float  # pages that requests own, of all
    num_running: int
    num_waiting: int


class LoadTimeline:
    """Samples of the loads of an engine, at equal distances that grow with the length of the run.

    The mean and the peak of the KV pages count every moment, not only the samples.
    """

    def __init__(self) -> None:
        self.samples: list[EngineLoad] = []
        self._interval = 0.0
        self._latest = EngineLoad(0.0, 0.0, 0, 0)
        self._area = 0.0
        self._peak = 0.0

    def add(self, load: EngineLoad) -> None:
        """Takes in the load from `load.at` on, which is not before that of the load before it."""
        seconds = load.at - self._latest.at
        self._area += seconds * self._latest.kv_share
        self._peak = max(self._peak, load.kv_share)
        self._latest = load
        if not self.samples or load.at >= self.samples[-1].at + self._interval:
            self.samples.append(load)
            if len(self.samples) == _MOST:
                self.samples = self.samples[::2]
                self._interval = max(2 * self._interval, (load.at - self.samples[0].at) / _MOST)

    @property
    def mean_kv_share(self) -> float:
        return self._area / self._latest.at if self._latest.at else 0.0

    @property
    def peak_kv_share(self) -> float:
        return self._peak
