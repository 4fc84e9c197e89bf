"""`EngineWeights`: the weights of an engine with the version that they have, and how others take their place."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxvllm.core.weight_version import KVChange, WeightVersion, check_kv_change
from jaxvllm.engine.expert_balancer import ExpertBalancer
from jaxvllm.engine.new_weights import WeightSource, new_weights
from jaxvllm.engine.replica import Replica
from jaxvllm.kv_transfer.versioned_connector import VersionedConnector
from jaxvllm.models.attention import KV_SCALES
from jaxvllm.models.lora import without_adapters
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.runtime.runner import Runner


@dataclass(frozen=True, eq=False)
class IncomingWeights:
    """Weights that were read and checked, and that no step has yet."""

    params: tuple[Params, ...]  # one for each holder; none where every process has taken its own
    version: WeightVersion
    kv: KVChange


class EngineWeights:
    """The weights of all replicas. They change between two steps: `prepare` may fail, and then `take` replaces all."""

    def __init__(
        self,
        spec: ModelSpec,
        replicas: Sequence[Replica],
        holders: Sequence[Runner],
        balancers: Sequence[ExpertBalancer],
        connector: VersionedConnector | None,
        read: Callable[[Mapping[str, Any] | Path, Sequence[Params] | None], list[Params]],
        *,
        has_others: bool,
    ):
        """Begins with the weights of the start. `has_others`: other processes have devices of the engine.

        `read` is `EngineParts.read_weights`.
        """
        self._replicas = replicas
        self._holders = holders
        self._balancers = balancers
        self._connector = connector
        self._read = read
        self._has_others = has_others
        self._has_kv_scales = any(KV_SCALES in layer.declare() for layer in spec.layers)
        self.version = WeightVersion()  # of the weights that the next step has

    @property
    def tree(self) -> Params:
        """The parameters of the first replica as they are on its devices: nested dicts and lists of arrays.

        Raises ValueError while they sleep.
        """
        if self._sleep:
            raise ValueError("the weights sleep, and are not on the devices: call wake_up first")
        return without_adapters(self._holders[0].params)

    @property
    def _sleep(self) -> bool:
        """Whether some of them are not on the devices."""
        return not all(holder.has_weights for holder in self._holders)

    def prepare(self, source: WeightSource, version: str | None, kv: KVChange, partial: bool) -> IncomingWeights:
        """Reads and checks what is to replace the weights. The arguments are those of `Engine.update_weights`.

        The weights stay, but for those on devices of several processes, each of which takes its own here, or none.
        Raises ValueError and NotImplementedError as `Engine.update_weights` says.
        """
        new_version = self.version.after(version)
        check_kv_change(kv)
        if partial and self._sleep:
            raise ValueError("a part needs the weights beside it, and they sleep: call wake_up first, or give all")
        if kv == "keep" and self._has_kv_scales:
            raise NotImplementedError("keys and values have scales among the weights here, so they go with these: drop")
        if not self._has_others:
            params = new_weights(source, [holder.params for holder in self._holders], self._read, partial)
            return IncomingWeights(tuple(params), new_version, kv)
        if not isinstance(source, Path) or partial:
            raise NotImplementedError(
                "weights on devices of several processes are replaced by those of a directory, which each of them "
                "reads: write a checkpoint where all hosts find it"
            )
        for holder in self._holders:
            holder.read_params(source)
        return IncomingWeights((), new_version, kv)

    def rename(self, name: str) -> None:
        """Gives the weights another name, from the next step on. They stay as they are, and so do cached prefixes."""
        self.version = self.version.after(name)
        for replica in self._replicas:
            replica.version = self.version
        if self._connector is not None:  # a page that is on its way gets the new name, and is right under either
            self._connector.version = self.version

    def take(self, incoming: IncomingWeights) -> None:
        """Lets all steps from the next one on compute with these weights.

        Then it computes what depends on them: places of experts, and ratios of DoRA. A device may have no memory left
        for that. After its error all replicas have the new weights, and the engine has to begin anew without requests.
        """
        for holder, params in zip(self._holders, incoming.params, strict=False):
            holder.replace_params(params)
        self.version = incoming.version
        for replica in self._replicas:
            replica.begin_version(incoming.version, keeps_pages=incoming.kv == "keep")
        if self._connector is not None:  # and no page of the weights before is on its way
            self._connector.version = incoming.version
        for balancer in self._balancers:
            balancer.place_all()
        for holder in self._holders:
            holder.bring_adapters_again()
