"""`EngineSleep`: whether the replicas of an engine are paused, and what of them is not on the devices."""

from collections.abc import Iterable, Sequence

from jaxvllm.core.pause import SLEEP_TAGS, PauseState, SleepTag
from jaxvllm.engine.expert_balancer import LoadMeter
from jaxvllm.engine.replica import Replica
from jaxvllm.runtime.runner import Runner


class EngineSleep:
    """Frees the memory of devices while no replica computes, and brings back what was there.

    Shapes, dtypes and places of all arrays stay the same, so that no program is compiled again.
    """

    def __init__(self, replicas: Sequence[Replica], holders: Sequence[Runner], meters: Sequence[LoadMeter]):
        self._replicas = replicas
        self._holders = holders
        self._meters = meters

    @property
    def is_paused(self) -> bool:
        """Whether requests that come now wait until `resume`."""
        return self._replicas[0].scheduler.pause_state is not PauseState.UNPAUSED

    @property
    def sleeping(self) -> tuple[SleepTag, ...]:
        """The tags of what is not on the devices."""
        is_gone = {
            "weights": not all(holder.has_weights for holder in self._holders),
            "kv_cache": not all(holder.has_pages for holder in self._holders),
        }
        return tuple(tag for tag in SLEEP_TAGS if is_gone.get(tag))

    def pause(self, state: PauseState) -> None:
        """Lets all replicas compute only what `state` says, from the next step that is planned."""
        for replica in self._replicas:
            replica.scheduler.pause_state = state

    def resume(self) -> None:
        """Lets all replicas compute. Raises ValueError while something sleeps."""
        if sleeping := self.sleeping:
            raise ValueError(
                f"the engine sleeps without its {' and its '.join(sleeping)}: call wake_up, and after sleep(level=2) "
                "update_weights before it"
            )
        self.pause(PauseState.UNPAUSED)

    def release_kv(self) -> None:
        """Frees pages and slots. No request may run. It waits for the loads of experts, which are among them."""
        for meter, holder in zip(self._meters, self._holders, strict=False):
            if holder.has_pages:
                meter.take()
                meter.read()
        for holder in self._holders:
            if holder.has_pages:
                holder.release_pages()

    def release_weights(self, level: int) -> None:
        """Moves weights to the host's memory (level 1), or drops them (level 2)."""
        for holder in self._holders:
            if level == 1:
                holder.park_weights()
            else:
                holder.drop_weights()

    def wake_up(self, tags: Iterable[SleepTag] | None) -> bool:
        """Brings back what `tags` name, or everything (None), as far as it exists. Returns whether nothing sleeps.

        Raises ValueError for an unknown tag.
        """
        wanted = SLEEP_TAGS if tags is None else tuple(tags)
        if wrong := [tag for tag in wanted if tag not in SLEEP_TAGS]:
            raise ValueError(f"tags must be among {', '.join(SLEEP_TAGS)}, not {wrong[0]!r}")
        for holder in self._holders:
            if "weights" in wanted:
                holder.unpark_weights()
            if "kv_cache" in wanted and not holder.has_pages:
                holder.reset()
        return not self.sleeping
