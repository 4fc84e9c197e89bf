"""An engine's counters over all its lives: they never go back, whatever happens to the engine."""

from jaxvllm.engine.stats import EngineStats

COUNTERS = (
    "num_steps",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_preemptions",
    "num_prefix_queries",
    "num_prefix_hits",
    "num_programs",
)


class EngineTotals:
    """Adds up the counters of `EngineStats`, which begin at zero with every process of the engine.

    Single ones begin at zero within a process too: the engine forgets its schedulers after a step that broke off.
    """

    def __init__(self) -> None:
        self._before = dict.fromkeys(COUNTERS, 0)  # in lives that have ended
        self._now = dict.fromkeys(COUNTERS, 0)

    def restart(self) -> None:
        """The engine's process is a new one."""
        for name in COUNTERS:
            self._begin(name)

    def update(self, stats: EngineStats) -> None:
        """Takes what this life has counted so far."""
        for name in COUNTERS:
            count = getattr(stats, name)
            if count < self._now[name]:
                self._begin(name)
            self._now[name] = count

    def __getitem__(self, name: str) -> int:
        """What the counter `name` of `EngineStats` has counted in all."""
        return self._before[name] + self._now[name]

    def _begin(self, name: str) -> None:
        self._before[name] += self._now[name]
        self._now[name] = 0
