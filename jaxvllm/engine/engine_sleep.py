"""`EngineSleep`: whether the replicas of an engine are paused, and what of them is not on the devices."""

from collections.abc import Iterable, Sequence

from jaxvllm.core.pause import SLEEP_LEVELS, SLEEP_TAGS, PauseState, SleepTag
from jaxvllm.engine.expert_balancer import LoadMeter
from jaxvllm.engine.replica import Replica
from jaxvllm.runtime.runner import Runner


class EngineSleep:
    """Frees the memory of devices while no replica computes, and brings back what was there.

    Shapes, dtypes and places of all arrays stay the same, so that no program is compiled again.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        holders: Sequence[Runner],
        meters: Sequence[LoadMeter],
        *,
        moves_pages: bool,
    ):
        """Takes what sleeps. If it `moves_pages`, some may be on their way to or from other places and must stay."""
        self._replicas = replicas
        self._holders = holders
        self._meters = meters
        self._moves_pages = moves_pages

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

    def check(self, level: int) -> None:
        """Raises ValueError for a level that does not exist, and NotImplementedError for one that this engine lacks."""
        if level not in SLEEP_LEVELS:
            raise ValueError(f"the level of sleep must be 0, 1 or 2, not {level!r}")
        if level and self._moves_pages:
            raise NotImplementedError(
                "the pages of an engine with a kv_transfer_config may be on their way elsewhere, and stay: sleep at "
                "level 0, or leave kv_transfer_config out"
            )

    def sleep(self, level: int) -> None:
        """Gives back memory of the devices until `wake_up`. The engine must be settled.

        0: none. 1: that of KV pages, as `release_kv` does, and that of weights, which go to the host's memory; on CPUs
        they are there already and stay. 2: both, and the weights are dropped: an update must bring others, and arrays
        that a caller holds stay.
        Raises ValueError unless the engine is paused and settled, and the errors of `check`.
        """
        self.check(level)
        self._check_rest()
        if not level:
            return
        self.release_kv()
        for holder in self._holders:
            if level == 1:
                holder.park_weights()
            else:
                holder.drop_weights()

    def release_kv(self) -> None:
        """Frees the memory of KV pages. Cached prefixes are forgotten, and so is the KV of requests.

        Requests that a pause has kept compute all their tokens again afterwards. It waits for the loads of experts,
        which go with the pages. Raises ValueError unless the engine is paused and settled, and NotImplementedError
        where KV pages go elsewhere, too.
        """
        self.check(level=1)
        self._check_rest()
        for replica in self._replicas:
            replica.scheduler.preempt_all()
            replica.forget_prefixes(elsewhere=False)
        for meter, holder in zip(self._meters, self._holders, strict=False):
            if holder.has_pages:
                meter.take()
                meter.read()
        for holder in self._holders:
            if holder.has_pages:
                holder.release_pages()

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

    def _check_rest(self) -> None:
        if not self.is_paused or any(replica.has_work for replica in self._replicas):
            raise ValueError(
                "only an engine that is paused, and has ended its steps, gives memory back: pause it first"
            )
